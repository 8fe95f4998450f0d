"""Oracles: the ``tokenizers`` library's own decode on valid text, and UTF-8 by hand."""

import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Library

from jaxsqueeze.text.tokenizer import Tokenizer
from tests.text import build_tokenizers

TEXTS = [
    "the quick brown fox",
    " leading space",
    "two  spaces and\n\nnewlines\ttab",
    "café 是的 😊 👩‍👩‍👧 e\u0301x",
    "London, hello!",
]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_round_trip(byte_level, text):
    assert byte_level.decode(byte_level.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_round_trip(sentencepiece, text):
    assert sentencepiece.decode(sentencepiece.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_decode_equals_the_library_on_valid_text(any_tokenizer, text, skip, tmp_path):
    library = Library.from_str(any_tokenizer._inner.to_str())
    ids = [*any_tokenizer.encode(text), any_tokenizer.token_id("<|im_end|>"), *any_tokenizer.encode(text)]
    assert any_tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


def test_other_threads_run_while_a_long_text_is_encoded(byte_level):
    work = threading.Thread(target=byte_level.encode, args=("the quick brown fox " * 50_000,))
    work.start()
    ticks = 0
    while work.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 20


def test_token_bytes_are_bytes_not_glyphs(byte_level):
    the = byte_level.token_id("Ġthe")
    assert byte_level.token_bytes(the) == b" the"
    assert byte_level.token_text(the) == " the"
    space = byte_level.encode(" ", add_special_tokens=False)
    assert byte_level.token_bytes(space[0]) == b" "


def test_one_token_for_a_chinese_character():
    tok = build_tokenizers.byte_level(vocab_size=900)
    ours = Tokenizer(tok, {})
    (token,) = ours.encode("是", add_special_tokens=False)
    assert ours.token_bytes(token) == bytes([0xE6, 0x98, 0xAF])
    assert ours.token_text(token) == "是"


def test_every_byte_is_reachable(byte_level):
    single = {byte_level.token_bytes(i) for i in range(byte_level.vocab_size)}
    assert {bytes([b]) for b in range(256)} <= single


def test_byte_fallback_and_partial_characters(sentencepiece):
    token = sentencepiece.token_id("<0xF0>")
    assert sentencepiece.token_bytes(token) == b"\xf0"
    assert sentencepiece.token_text(token) == "bytes:\\xf0"
    assert sentencepiece.token_bytes(sentencepiece.token_id("▁London")) == b" London"


def test_special_and_padding_ids(byte_level):
    end = byte_level.token_id("<|im_end|>")
    assert end in byte_level.special_ids
    assert byte_level.token_bytes(end) == b"<|im_end|>"
    assert byte_level.token_bytes(byte_level.vocab_size + 7) == b""
    assert byte_level.decode([end]) == ""
    assert byte_level.decode([end], skip_special_tokens=False) == "<|im_end|>"


def test_added_token_with_non_latin_text_is_itself():
    tok = build_tokenizers.byte_level()
    tok.add_special_tokens(["<｜begin▁of▁sentence｜>"])
    tok.add_tokens(["é"])
    ours = Tokenizer(tok, {})
    assert ours.token_bytes(ours.token_id("<｜begin▁of▁sentence｜>")).decode() == "<｜begin▁of▁sentence｜>"
    assert ours.token_bytes(ours.token_id("é")) == "é".encode()


def test_gemma_like_added_space_runs():
    """Non-special added tokens of a SentencePiece tokenizer spell spaces with ▁ too."""
    tok = build_tokenizers.sentencepiece()
    tok.add_tokens([AddedToken("▁▁▁", normalized=False)])
    ours = Tokenizer(tok, {})
    assert ours.token_bytes(ours.token_id("▁▁▁")) == b"   "


def test_exactly_one_dummy_space_is_removed(sentencepiece, byte_level):
    ids = [sentencepiece.token_id(p) for p in ("▁", "▁leading", "▁x")]
    assert sentencepiece.decode(ids) == " leading x"
    the = byte_level.token_id("Ġthe")
    assert byte_level.decode([the]) == " the"


class TestBos:
    def test_raw_text_gets_one(self, sentencepiece):
        ids = sentencepiece.encode("the")
        assert ids[0] == sentencepiece.bos_token_id
        assert ids.count(sentencepiece.bos_token_id) == 1
        assert sentencepiece.encode("") == [sentencepiece.bos_token_id]

    def test_text_that_spells_it_gets_one(self, sentencepiece):
        ids = sentencepiece.encode("<s>the")
        assert ids.count(sentencepiece.bos_token_id) == 1

    def test_none_without_special_tokens(self, sentencepiece):
        assert sentencepiece.bos_token_id not in sentencepiece.encode("the", add_special_tokens=False)

    def test_a_tokenizer_without_bos_adds_none(self, byte_level):
        assert not byte_level.adds_bos
        start = byte_level.token_id("<|im_start|>")
        assert byte_level.encode("<|im_start|><|im_start|>a")[:2] == [start, start]

    def test_add_bos_token_of_the_config_is_honoured(self, tmp_path):
        folder = build_tokenizers.write_folder(tmp_path, build_tokenizers.sentencepiece(bos=False), add_bos_token=True)
        ours = Tokenizer.load(folder)
        assert ours.encode("the").count(ours.bos_token_id) == 1
        assert ours.encode("<s>the").count(ours.bos_token_id) == 1


class TestLoad:
    def test_missing_file_is_named(self, tmp_path):
        with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
            Tokenizer.load(tmp_path)

    def test_unreadable_file_is_named(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)

    def test_unsupported_decoder_is_refused(self):
        tok = Library(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
        tok.decoder = decoders.WordPiece()
        with pytest.raises(ValueError, match="WordPiece"):
            Tokenizer(tok, {})

    def test_special_tokens_as_objects_and_named_templates(self, tmp_path):
        folder = build_tokenizers.write_folder(
            tmp_path,
            build_tokenizers.sentencepiece(),
            eos_token={"content": "</s>", "special": True},
            chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
        )
        ours = Tokenizer.load(folder)
        assert ours.eos_token_id == ours.token_id("</s>")
        assert ours.chat_template == "D"

    def test_jinja_file_comes_before_the_config(self, tmp_path):
        folder = build_tokenizers.write_folder(tmp_path, build_tokenizers.sentencepiece())
        (folder / "chat_template.jinja").write_text("file")
        assert Tokenizer.load(folder).chat_template == "file"

    def test_saved_truncation_and_padding_are_off(self, tmp_path):
        tok = build_tokenizers.byte_level()
        tok.enable_truncation(2)
        tok.enable_padding(length=50)
        folder = build_tokenizers.write_folder(tmp_path, tok)
        assert json.loads((folder / "tokenizer.json").read_text())["truncation"]
        text = "the quick brown fox jumps"
        ours = Tokenizer.load(folder)
        assert ours.decode(ours.encode(text)) == text


def test_lone_surrogates_read_as_replacement(byte_level):
    assert byte_level.decode(byte_level.encode("a\ud83db")) == "a\ufffdb"


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_round_trips(byte_level, text):
    text = text.replace("\r", "")
    ids = byte_level.encode(text, add_special_tokens=False)
    assert byte_level.decode(ids, skip_special_tokens=False) == text
