import pytest

from jaxsqueeze.text.bad_words import bad_words_ids
from jaxsqueeze.text.tokenizer import Tokenizer
from tests.text import build_tokenizers


def spellings(tokenizer, *words):
    return {tuple(tokenizer.token_bytes(i) for i in ids) for ids in bad_words_ids(tokenizer, words)}


def test_both_spellings_when_they_differ_in_length(sentencepiece):
    """ "London" inside a text is two ids, " London" one: both are blocked."""
    assert spellings(sentencepiece, "London") == {(b" London",), (b"Lon", b"don")}


def test_byte_level_both_spellings(byte_level):
    found = bad_words_ids(byte_level, ["London"])
    texts = [b"".join(byte_level.token_bytes(i) for i in ids) for ids in found]
    assert sorted(texts) == [b" London", b"London"]
    for text in ("London", " London"):
        assert tuple(byte_level.encode(text, add_special_tokens=False)) in found


def test_every_sequence_stands_for_the_word_alone(any_tokenizer):
    for words in (["the"], ["London", "dog"], [" hello"], ["是"]):
        for ids in bad_words_ids(any_tokenizer, words):
            text = b"".join(any_tokenizer.token_bytes(i) for i in ids).decode()
            assert text.removeprefix(" ") in [w.strip() for w in words]


def test_bos_is_not_part_of_a_word(sentencepiece):
    assert all(sentencepiece.bos_token_id not in ids for ids in bad_words_ids(sentencepiece, ["the"]))


@pytest.mark.parametrize("word", ["", "  "])
def test_empty_words_are_refused(byte_level, word):
    with pytest.raises(ValueError, match="bad_words"):
        bad_words_ids(byte_level, [word])


def test_repeated_words_count_once():
    tok = Tokenizer(build_tokenizers.byte_level(), {})
    assert bad_words_ids(tok, ["dog", "dog", " dog"]) == bad_words_ids(tok, ["dog"])
