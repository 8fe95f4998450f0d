"""What penalties, biases, bad words and early stops do to a logit, seen from outside: a rival just above the right
value wins, one just below it loses."""

from __future__ import annotations

import pytest

from tests.runner.build_slots import LOW, V, choose, row

TOKEN, RIVAL = 5, 7
MARGIN = 0.01


def assert_becomes(logit: float, right: float, **sequence: object) -> None:
    """Beside neighbours without any settings, which must not feel it, and the other way round."""
    plain = row(prompt=(TOKEN, RIVAL), output=(TOKEN, TOKEN))
    rows = {1: row(**sequence), 6: row(**sequence), 0: plain, 2: plain, 7: plain}
    logits = {
        1: {TOKEN: logit, RIVAL: right - MARGIN},
        6: {TOKEN: logit, RIVAL: right + MARGIN},
        0: {TOKEN: 1, RIVAL: 1 - MARGIN},
        2: {TOKEN: -3, RIVAL: -3 + MARGIN},
        7: {TOKEN: 0, RIVAL: -MARGIN},
    }
    assert choose(rows, logits) == {1: TOKEN, 6: RIVAL, 0: TOKEN, 2: RIVAL, 7: TOKEN}


class TestPenalties:
    @pytest.mark.parametrize("setting", ["frequency_penalty", "presence_penalty"])
    def test_prompt_tokens_do_not_count_for_frequency_and_presence(self, setting):
        assert_becomes(1, 1, prompt=(TOKEN, TOKEN), **{setting: 2.0})

    @pytest.mark.parametrize(("logit", "right"), [(1, 0.5), (-1, -2), (0, 0)])
    def test_repetition_counts_the_prompt(self, logit, right):
        assert_becomes(logit, right, prompt=(TOKEN, TOKEN), repetition_penalty=2.0)

    @pytest.mark.parametrize(("logit", "right"), [(1, 0.5), (-1, -2)])
    def test_repetition_counts_the_output_once(self, logit, right):
        assert_becomes(logit, right, output=(TOKEN, 3, TOKEN), repetition_penalty=2.0)

    def test_repetition_below_one_attracts(self):
        assert_becomes(1, 2, prompt=(TOKEN,), repetition_penalty=0.5)
        assert_becomes(-1, -0.5, prompt=(TOKEN,), repetition_penalty=0.5)

    def test_frequency_counts_each_time(self):
        assert_becomes(1, -0.5, output=(TOKEN, 3, TOKEN, TOKEN), frequency_penalty=0.5)

    def test_presence_counts_once(self):
        assert_becomes(1, 0.5, output=(TOKEN, 3, TOKEN, TOKEN), presence_penalty=0.5)

    def test_negative_penalties_attract(self):
        assert_becomes(1, 5, output=(TOKEN, TOKEN), frequency_penalty=-1.5, presence_penalty=-1)

    def test_all_together_repetition_first(self):
        settings = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 1.0}
        assert_becomes(3, 1.5 - 3 * 0.25 - 1, prompt=(TOKEN,), output=(TOKEN, TOKEN, TOKEN), **settings)

    def test_tokens_not_seen_are_untouched(self):
        settings = {"repetition_penalty": 2.0, "frequency_penalty": 2.0, "presence_penalty": 2.0}
        assert_becomes(1, 1, prompt=(TOKEN - 1, 0), output=(TOKEN + 1, V - 1), **settings)


class TestLogitBias:
    def test_adds(self):
        assert_becomes(1, 3.5, logit_bias=((TOKEN, 2.5),))
        assert_becomes(1, -1.5, logit_bias=((2, 1.0), (TOKEN, -2.5)))

    def test_entries_of_one_token_add_up(self):
        assert_becomes(1, 4, logit_bias=((TOKEN, 2.0), (3, 1.0), (TOKEN, 1.0)))

    def test_comes_before_penalties(self):
        assert_becomes(-1, 1.5, prompt=(TOKEN,), logit_bias=((TOKEN, 4.0),), repetition_penalty=2.0)

    @pytest.mark.parametrize("token", [0, V - 1])
    def test_ends_of_the_vocabulary(self, token):
        rows = {0: row(logit_bias=((token, 60.0),)), 1: row()}
        assert choose(rows, {0: {9: 0}, 1: {9: 0}}) == {0: token, 1: 9}

    def test_as_many_entries_as_are_allowed(self):
        bias = tuple((i % V, 1.0) for i in range(512))  # 12 or 13 entries for each token
        rows = {0: row(logit_bias=bias)}
        assert choose(rows, {0: {31: 0.5, 32: 1.4}}) == {0: 31}
        assert choose(rows, {0: {31: 0.5, 32: 1.6}}) == {0: 32}


class TestBadWords:
    def next_token(self, words, output=(), prompt=(1,)) -> int:
        rows = {3: row(prompt=prompt, output=output, bad_words_ids=words), 4: row(output=output)}
        chosen = choose(rows, {3: {TOKEN: 2, RIVAL: 1}, 4: {TOKEN: 2, RIVAL: 1}})
        assert chosen[4] == TOKEN
        return chosen[3]

    def test_a_single_token(self):
        assert self.next_token(((TOKEN,),)) == RIVAL
        assert self.next_token(((RIVAL,),)) == TOKEN

    @pytest.mark.parametrize("length", range(2, 9))
    def test_a_sequence_is_blocked_at_its_last_token_only(self, length):
        word = (*range(10, 10 + length - 1), TOKEN)
        head = word[:-1]
        assert self.next_token((word,), output=head) == RIVAL
        assert self.next_token((word,), output=(9, *head)) == RIVAL
        assert self.next_token((word,), output=head[1:]) == TOKEN
        assert self.next_token((word,), output=(*head[:-1], 9)) == TOKEN
        assert self.next_token((word,), output=(*head, 9)) == TOKEN

    def test_the_prompt_is_not_the_answer(self):
        assert self.next_token(((11, TOKEN),), prompt=(11,)) == TOKEN

    def test_both_spellings_of_a_word(self):
        # "London" is 2 ids, " London" is 1.
        words = ((20, TOKEN), (RIVAL,))
        rows = {0: row(output=(20,), bad_words_ids=words), 1: row(output=(21,), bad_words_ids=words)}
        assert choose(rows, {s: {TOKEN: 3, RIVAL: 2, 9: 1} for s in rows}) == {0: 9, 1: TOKEN}

    def test_as_many_words_as_are_allowed(self):
        words = tuple((i,) for i in range(32))
        rows = {0: row(bad_words_ids=words)}
        assert choose(rows, {0: dict.fromkeys(range(32), 2) | {32: 1}}) == {0: 32}


class TestMinTokens:
    STOPS = (2, TOKEN)

    @pytest.mark.parametrize("output", [(), (9,), (9, 9), (9, 9, 9)])
    def test_every_stop_id_is_masked_before(self, output):
        rows = {0: row(output=output, stop_ids=self.STOPS, min_tokens=4)}
        assert choose(rows, {0: {2: 3, TOKEN: 2, RIVAL: 1}}) == {0: RIVAL}

    def test_none_is_masked_after(self):
        rows = {s: row(output=(9,) * 4, stop_ids=self.STOPS, min_tokens=4) for s in (0, 1)}
        assert choose(rows, {0: {2: 3, RIVAL: 1}, 1: {TOKEN: 3, RIVAL: 1}}) == {0: 2, 1: TOKEN}

    def test_the_prompt_does_not_count(self):
        rows = {0: row(prompt=(9,) * 10, stop_ids=self.STOPS, min_tokens=1)}
        assert choose(rows, {0: {TOKEN: 2, RIVAL: 1}}) == {0: RIVAL}

    def test_without_it_nothing_is_masked(self):
        rows = {0: row(stop_ids=self.STOPS), 1: row(stop_ids=self.STOPS, min_tokens=3)}
        assert choose(rows, {s: {TOKEN: 2, RIVAL: 1} for s in rows}) == {0: TOKEN, 1: RIVAL}

    def test_neither_bias_nor_penalties_lift_a_masked_token(self):
        settings = {
            "min_tokens": 2,
            "logit_bias": ((TOKEN, 100.0),),
            "frequency_penalty": -2.0,
            "repetition_penalty": 3,
        }
        rows = {0: row(output=(TOKEN,), stop_ids=self.STOPS, **settings)}
        assert choose(rows, {0: {RIVAL: LOW + 1}}) == {0: RIVAL}
