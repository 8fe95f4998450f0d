"""``LLM``: texts, ids and conversations in, generations out in the same order; refusals run nothing."""

from __future__ import annotations

import dataclasses

import pytest

from jaxsqueeze.llm import LLM
from jaxsqueeze.types import RequestRefused, SamplingParams
from tests.engine.traffic import random_ids

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True, **changes})


def idle(llm: LLM) -> bool:
    stats = llm.engine.stats()
    return (stats.running, stats.waiting) == (0, 0)


class TestGenerate:
    def test_text_and_its_ids_agree(self, llm):
        ids = llm.engine.tokenizer.encode("Once upon")
        by_text, by_ids = llm.generate("Once upon", GREEDY), llm.generate(ids, GREEDY)
        assert by_text == by_ids == llm.generate(["Once upon"], GREEDY) == llm.generate([ids], GREEDY)
        assert by_text[0].prompt_ids == tuple(ids)

    def test_answers_are_right_and_read_as_their_ids(self, llm, oracle):
        (g,) = llm.generate("Once upon", GREEDY)
        (choice,) = g.choices
        assert list(choice.token_ids) == oracle.greedy(g.prompt_ids, 30)
        # The answer continues the prompt: one token is one byte here, and a character may be cut at either end.
        whole = llm.engine.tokenizer.decode([*g.prompt_ids, *choice.token_ids])
        assert whole == "Once upon" + choice.text
        assert g.text == choice.text
        assert (choice.finish_reason, choice.stop_reason, choice.error) == ("length", None, None)

    def test_results_come_in_the_order_of_the_prompts(self, llm):
        """Short ones end first."""
        prompts = [list(random_ids(i, 5 + 11 * (i % 3))) for i in range(9)]
        params = [greedy(max_tokens=30 - 3 * i) for i in range(9)]
        together = llm.generate(prompts, params)
        assert [g.prompt_ids for g in together] == [tuple(p) for p in prompts]
        assert [len(g.choices[0].token_ids) for g in together] == [30 - 3 * i for i in range(9)]
        for prompt, p, g in zip(prompts, params, together, strict=True):
            assert llm.generate(prompt, p)[0].choices[0].token_ids == g.choices[0].token_ids

    def test_nothing_to_do(self, llm):
        assert llm.generate([], GREEDY) == []
        assert llm.chat([]) == []

    def test_params_for_each(self, llm):
        with pytest.raises(ValueError, match="1 params for 2 prompts"):
            llm.generate(["a", "b"], [GREEDY])

    def test_prompt_and_token_scores(self, llm):
        (g,) = llm.generate(list(random_ids(0, 12)), greedy(max_tokens=4, logprobs=1, prompt_logprobs=0))
        assert len(g.prompt_logprobs) == 12
        assert [x.token_id for x in g.choices[0].logprobs] == list(g.choices[0].token_ids)
        (bare,) = llm.generate(list(random_ids(0, 12)), greedy(max_tokens=4))
        assert (bare.prompt_logprobs, bare.choices[0].logprobs) == (None, None)

    def test_zero_tokens(self, llm):
        (g,) = llm.generate("Once upon", greedy(max_tokens=0, prompt_logprobs=0))
        assert len(g.prompt_logprobs) == len(g.prompt_ids)
        assert (g.text, g.choices[0].token_ids, g.choices[0].finish_reason) == ("", (), "length")


class TestStops:
    @pytest.fixture
    def text(self, llm) -> str:
        return llm.generate("Once upon", GREEDY)[0].text

    def test_a_stop_string_ends_text_ids_and_logprobs(self, llm, text):
        stop = next(text[i : i + 2] for i in range(5, 20) if text.find(text[i : i + 2]) == i)
        (choice,) = llm.generate("Once upon", greedy(stop=(stop,), logprobs=0))[0].choices
        assert choice.text == text[: text.find(stop)]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert len(choice.token_ids) == len(choice.logprobs) < 30
        assert idle(llm)
        (kept,) = llm.generate("Once upon", greedy(stop=(stop,), include_stop_str_in_output=True))[0].choices
        assert kept.text == choice.text + stop

    def test_lists_strings_and_dicts_do_for_tuples(self, llm, text):
        stop = text[8]
        expected = llm.generate("Once upon", greedy(stop=(stop,), logit_bias=((5, -3.0),)))
        assert llm.generate("Once upon", greedy(stop=stop, logit_bias={5: -3.0})) == expected
        lists = greedy(stop=[stop], logit_bias=[[5, -3.0]], stop_token_ids=[], bad_words_ids=[])
        assert llm.generate("Once upon", lists) == expected
        assert greedy(stop="end").stop == ("end",)

    def test_others_go_on_after_a_stop_string(self, llm, text):
        stopped, whole = llm.generate(["Once upon", "Once upon"], [greedy(stop=(text[8],)), GREEDY])
        assert stopped.text == text[: text.find(text[8])]
        assert whole.text == text

    def test_an_early_stop_string_is_plain_text(self, llm, text):
        """Before min_tokens; the same string later ends it."""
        stop = text[1]
        (choice,) = llm.generate("Once upon", greedy(stop=(stop,), min_tokens=6))[0].choices
        assert len(choice.token_ids) >= 6
        assert choice.text.startswith(text[:3])

    def test_a_stop_id_is_no_part_of_the_text(self, llm, text):
        (choice,) = llm.generate("Once upon", GREEDY)[0].choices
        stop = choice.token_ids[9]
        at = choice.token_ids.index(stop)
        (cut,) = llm.generate("Once upon", greedy(stop_token_ids=(stop,)))[0].choices
        assert cut.token_ids == choice.token_ids[: at + 1]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        assert text.startswith(cut.text)


class TestChat:
    CONVERSATION = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})

    def test_goes_through_the_template(self, llm):
        (g,) = llm.chat(list(self.CONVERSATION), GREEDY)
        shown = llm.engine.tokenizer.decode(g.prompt_ids, skip_special_tokens=False)
        assert shown == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        )
        assert g.choices[0].token_ids == llm.generate(list(g.prompt_ids), GREEDY)[0].choices[0].token_ids

    def test_one_conversation_or_several(self, llm):
        one = llm.chat(list(self.CONVERSATION), GREEDY)
        other = [{"role": "user", "content": "Bye"}]
        assert llm.chat([list(self.CONVERSATION), other], GREEDY) == one + llm.chat([other], GREEDY)

    def test_an_open_turn_keeps_the_space_that_a_new_one_drops(self, llm, monkeypatch):
        """SentencePiece puts a space of its own before a text; inside a text a space is the text's."""
        tokenizer = llm.engine.tokenizer
        monkeypatch.setattr(tokenizer, "rule", dataclasses.replace(tokenizer.rule, strips_space=True))
        (space,) = tokenizer.encode(" ")
        spaces = greedy(max_tokens=3, logit_bias=((space, 1000.0),))
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        (new,) = llm.chat(turns[:1], spaces)
        (opened,) = llm.chat(turns, spaces, add_generation_prompt=False, continue_final_message=True)
        assert (new.text, opened.text) == (" " * 2, " " * 3)


class TestRefusals:
    def test_one_that_never_fits_stops_all_before_anything_runs(self, llm):
        steps = llm.engine.timings.steps
        with pytest.raises(RequestRefused, match="the prompt has 500 tokens"):
            llm.generate([[5] * 10, [5] * 500, [5] * 10], SamplingParams(n=2, max_tokens=5))
        assert idle(llm)
        assert llm.engine.timings.steps == steps
        assert len(llm.generate([5] * 10, GREEDY)[0].choices[0].token_ids) == 30

    @pytest.mark.parametrize("prompt", [[259], [-1]])
    def test_ids_outside_the_vocabulary(self, llm, prompt):
        with pytest.raises(RequestRefused, match="outside the vocabulary"):
            llm.generate(prompt)

    def test_an_empty_prompt(self, llm):
        with pytest.raises(RequestRefused, match="empty"):
            llm.generate([[]])

    def test_an_interrupt_frees_everything(self, llm, monkeypatch):
        real = llm.engine.step
        count = iter(range(100))

        def step():
            if next(count) == 5:
                raise KeyboardInterrupt
            return real()

        monkeypatch.setattr(llm.engine, "step", step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5] * 10] * 8, GREEDY)
        assert idle(llm)
        monkeypatch.undo()
        assert len(llm.generate([5] * 10, GREEDY)[0].choices[0].token_ids) == 30


def test_without_progress_nothing_is_printed(llm, capfd):
    llm.generate(["a", "b"], GREEDY)
    assert capfd.readouterr() == ("", "")


def test_with_progress_off_a_terminal_no_bar_is_drawn(llm, capfd, monkeypatch):
    monkeypatch.setattr(llm, "_progress", True)
    llm.generate(["a", "b"], GREEDY)
    assert capfd.readouterr() == ("", "")
