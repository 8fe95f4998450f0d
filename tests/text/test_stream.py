"""Incremental text against the whole decode and against brute-force search for stop strings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from jaxsqueeze.text.detokenize import Detokenizer
from jaxsqueeze.text.stop import StopFilter
from jaxsqueeze.text.stream import ChoiceStream
from jaxsqueeze.text.tokenizer import Tokenizer
from jaxsqueeze.types import FinishReason, Logprob, SamplingParams, TokenEvent


def byte_ids(tokenizer, text: str) -> list[int]:
    """One token per byte of the text (byte-level tokenizer)."""
    by_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [by_byte[bytes([b])] for b in text.encode()]


def char_ids(tokenizer, *pieces: str) -> list[int]:
    return [i for p in pieces for i in byte_ids(tokenizer, p)]


def play(tokenizer, ids, sampling=None, group=1, reason=FinishReason.LENGTH, prompt_ids=(), **last):
    """Pushes ids in groups of ``group``; the last event carries ``reason``. Returns the deltas."""
    stream = ChoiceStream(tokenizer, sampling or SamplingParams(), prompt_ids)
    groups = [tuple(ids[i : i + group]) for i in range(0, len(ids), group)] or [()]
    deltas = []
    for index, part in enumerate(groups):
        final = index == len(groups) - 1
        lps = tuple(Logprob(t, -1.0, 1, ()) for t in part)
        event = TokenEvent("r", part, logprobs=lps, finish_reason=reason if final else None, **(last if final else {}))
        deltas.append(stream.push(event))
    return deltas


def joined(deltas) -> str:
    return "".join(d.text for d in deltas)


class TestBytes:
    def test_emoji_split_in_two_tokens_beside_another_stream(self, byte_level):
        first, second = Detokenizer(byte_level), Detokenizer(byte_level)
        ids, other = byte_ids(byte_level, "😊"), byte_ids(byte_level, "是的")
        got, got_other = [], []
        for a, b in zip(ids, other, strict=False):
            got.append(first.push(a))
            got_other.append(second.push(b))
        assert got == ["", "", "", "😊"]
        assert got_other == ["", "", "是", ""]

    def test_emoji_in_two_tokens_of_two_bytes_beside_another_stream(self):
        ((glyphs, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("😊")
        library = Library(models.BPE({glyphs[:2]: 0, glyphs[2:]: 1, "x": 2}, []))
        library.decoder = decoders.ByteLevel()
        tokenizer = Tokenizer(library, {})
        assert [tokenizer.token_bytes(i) for i in (0, 1)] == [b"\xf0\x9f", b"\x98\x8a"]
        first, second = Detokenizer(tokenizer), Detokenizer(tokenizer)
        got = [(first.push(a), second.push(b)) for a, b in zip((0, 1, 2), (2, 0, 1), strict=True)]
        assert got == [("", "x"), ("😊", ""), ("x", "😊")]

    @pytest.mark.parametrize("cut", [1, 2, 3])
    def test_cut_inside_a_character_equals_the_whole_decode(self, byte_level, cut):
        ids = byte_ids(byte_level, "a😊")[: 1 + cut]
        assert joined(play(byte_level, ids)) == byte_level.decode(ids) == "a\ufffd"

    @pytest.mark.parametrize("text", ["e\u0301x", "❤\ufe0f!", "👩‍👩‍👧‍👦x", "क्षि"])
    def test_combining_marks_come_once_in_order(self, byte_level, text):
        assert joined(play(byte_level, byte_ids(byte_level, text))) == text

    def test_one_dummy_space_removed_once(self, sentencepiece):
        ids = [sentencepiece.token_id(p) for p in ("▁", "▁leading", "▁x")]
        assert [d.text for d in play(sentencepiece, ids)] == ["", " leading", " x"]

    def test_text_that_continues_a_prompt_keeps_its_space(self, sentencepiece):
        hello, world = sentencepiece.token_id("▁Hello"), sentencepiece.token_id("▁world")
        prompt = [sentencepiece.bos_token_id, hello]
        assert joined(play(sentencepiece, [world], prompt_ids=prompt)) == " world"
        assert joined(play(sentencepiece, [world])) == "world"

    def test_output_completes_a_character_the_prompt_began(self, byte_level):
        ids = byte_ids(byte_level, "😊")
        assert joined(play(byte_level, ids[2:], prompt_ids=ids[:2])) == "😊"

    def test_a_character_the_prompt_left_unfinished_is_not_output(self, byte_level):
        assert Detokenizer(byte_level, byte_ids(byte_level, "😊")[:2]).finish() == ""

    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_any_ids_any_grouping_equal_the_whole_decode(self, any_tokenizer, data):
        ids = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_size + 3), max_size=30))
        group = data.draw(st.integers(1, 5))
        skip = data.draw(st.booleans())
        sampling = SamplingParams(skip_special_tokens=skip)
        assert joined(play(any_tokenizer, ids, sampling, group)) == any_tokenizer.decode(ids, skip)

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_prompt_and_output_add_up_to_one_text(self, any_tokenizer, data):
        ids = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_size + 3), max_size=16))
        cut = data.draw(st.integers(0, len(ids)))
        whole, continued = Detokenizer(any_tokenizer), Detokenizer(any_tokenizer, ids[:cut])
        for i in ids[:cut]:
            whole.push(i)
        assert [continued.push(i) for i in ids[cut:]] == [whole.push(i) for i in ids[cut:]]
        # A character that only the prompt began is the prompt's to show.
        has_bytes = any(i not in any_tokenizer.special_ids and any_tokenizer.token_bytes(i) for i in ids[cut:])
        assert continued.finish() == (whole.finish() if has_bytes else "")


class TestStopStrings:
    def sampling(self, *stop, **kw):
        return SamplingParams(stop=stop, **kw)

    def test_start_of_a_stop_string_does_not_leak(self, byte_level):
        ids = byte_level_pieces(byte_level, ["DEF", "G", "HI", "J", "x"])
        deltas = play_pieces(byte_level, ids, self.sampling("DEFGHIJ"))
        assert [d.text for d in deltas] == ["", "", "", "", ""]
        assert deltas[3].finish_reason is FinishReason.STOP
        assert deltas[3].stop_reason == "DEFGHIJ"
        assert deltas[4].token_ids == ()

    def test_held_text_is_released_whole_on_divergence(self, byte_level):
        ids = byte_level_pieces(byte_level, ["DEF", "G", "x"])
        assert [d.text for d in play_pieces(byte_level, ids, self.sampling("DEFGHIJ"))] == ["", "", "DEFGx"]

    @pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
    def test_held_text_is_released_at_the_end(self, byte_level, reason):
        assert joined(play(byte_level, byte_ids(byte_level, "aDEF"), self.sampling("DEFG"), reason=reason)) == "aDEF"

    def test_held_text_is_released_at_eos_whose_own_text_is_hidden(self, byte_level):
        ids = [*byte_ids(byte_level, "aDEF"), byte_level.eos_token_id]
        for skip in (True, False):
            sampling = self.sampling("DEFG", skip_special_tokens=skip)
            assert joined(play(byte_level, ids, sampling, reason=FinishReason.STOP)) == "aDEF"

    def test_stop_id_text_is_hidden_unless_asked_for(self, byte_level):
        ids = byte_ids(byte_level, "ab")
        assert joined(play(byte_level, ids, reason=FinishReason.STOP, stop_reason=ids[-1])) == "a"
        keep = SamplingParams(include_stop_str_in_output=True)
        deltas = play(byte_level, ids, keep, reason=FinishReason.STOP, stop_reason=ids[-1])
        assert joined(deltas) == "ab"
        assert deltas[-1].stop_reason == ids[-1]

    def test_stop_inside_a_multi_token_step_ends_ids_and_logprobs_there(self, byte_level):
        ids = byte_ids(byte_level, "aSbc")
        (delta,) = play(byte_level, ids, self.sampling("S"), group=4)
        assert delta.text == "a"
        assert delta.token_ids == tuple(ids[:2])
        assert [x.token_id for x in delta.logprobs] == ids[:2]
        assert len(delta.offsets) == 2
        assert delta.finish_reason is FinishReason.STOP

    def test_include_stop_string(self, byte_level):
        ids = byte_ids(byte_level, "aSTOPb")
        assert joined(play(byte_level, ids, self.sampling("STOP", include_stop_str_in_output=True))) == "aSTOP"

    def test_min_tokens_makes_an_early_stop_plain_text(self, byte_level):
        ids = byte_ids(byte_level, "a\nbc\nd")
        sampling = self.sampling("\n", min_tokens=4)
        for group in (1, 2, 6):
            deltas = play(byte_level, ids, sampling, group)
            assert joined(deltas) == "a\nbc"
            assert sum(len(d.token_ids) for d in deltas) == 5

    def test_min_tokens_boundary(self, byte_level):
        ids = byte_ids(byte_level, "abcSd")
        assert joined(play(byte_level, ids, self.sampling("S", min_tokens=3))) == "abc"
        assert joined(play(byte_level, ids, self.sampling("S", min_tokens=4))) == "abcSd"

    def test_early_stop_that_is_a_prefix_of_another_is_still_held(self, byte_level):
        sampling = self.sampling("\n", "\n\nQ:", min_tokens=2)
        deltas = play(byte_level, byte_ids(byte_level, "a\n"), sampling, reason=FinishReason.LENGTH)
        assert [d.text for d in deltas] == ["a", "\n"]

    def test_empty_stop_string_is_refused(self):
        with pytest.raises(ValueError, match="stop"):
            SamplingParams(stop=("",))

    def test_stop_across_a_multibyte_character(self, byte_level):
        ids = byte_ids(byte_level, "x是y")
        deltas = play(byte_level, ids, self.sampling("是"))
        assert joined(deltas) == "x"
        assert deltas[3].finish_reason is FinishReason.STOP

    @settings(max_examples=200, deadline=None)
    @given(
        text=st.text(alphabet="ab", max_size=14),
        stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
        group=st.integers(1, 4),
        floor=st.integers(0, 4),
        keep=st.booleans(),
    )
    def test_against_brute_force(self, byte_level, text, stops, group, floor, keep):
        ends = [(end, -len(s), s) for s in stops for end in range(len(text) + 1) if text[:end].endswith(s)]
        ends = [e for e in ends if e[0] > floor]
        if ends:
            end, negative, stop = min(ends)
            want, tokens = text[: end if keep else end + negative], end
        else:
            want, tokens, stop = text, len(text), None
        sampling = SamplingParams(stop=tuple(stops), min_tokens=floor, include_stop_str_in_output=keep)
        deltas = play(byte_level, byte_ids(byte_level, text), sampling, group)
        assert joined(deltas) == want
        assert sum(len(d.token_ids) for d in deltas) == tokens
        if stop:
            assert next(d for d in deltas if d.finish_reason).stop_reason == stop

    @settings(max_examples=200, deadline=None)
    @given(
        text=st.text(alphabet="ab", max_size=14),
        stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    )
    def test_held_text_is_exactly_what_may_still_stop(self, text, stops):
        stop_filter = StopFilter(tuple(stops))
        shown = ""
        for index, char in enumerate(text):
            shown += stop_filter.push(char)
            if stop_filter.stopped:
                return
            seen = text[: index + 1]
            may = [k for s in stops for k in range(len(s)) if seen.endswith(s[:k])]
            assert shown == seen[: len(seen) - max(may)]


class TestOffsets:
    def test_offsets_count_characters_before_each_token(self, byte_level):
        ids = byte_ids(byte_level, "a是b")
        deltas = play(byte_level, ids)
        assert [o for d in deltas for o in d.offsets] == [0, 1, 1, 1, 2]

    def test_zero_tokens(self, byte_level):
        (delta,) = play(byte_level, [])
        assert delta.text == ""
        assert delta.token_ids == ()
        assert delta.finish_reason is FinishReason.LENGTH


def byte_level_pieces(tokenizer, pieces):
    return [byte_ids(tokenizer, p) for p in pieces]


def play_pieces(tokenizer, pieces, sampling):
    """Each piece is one event."""
    stream = ChoiceStream(tokenizer, sampling)
    last = len(pieces) - 1
    return [
        stream.push(TokenEvent("r", tuple(p), finish_reason=FinishReason.LENGTH if i == last else None))
        for i, p in enumerate(pieces)
    ]
