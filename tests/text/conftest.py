import pytest

from jaxsqueeze.text.tokenizer import Tokenizer
from tests.text import build_tokenizers


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(
        build_tokenizers.write_folder(tmp_path_factory.mktemp("byte_level"), build_tokenizers.byte_level())
    )


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(
        build_tokenizers.write_folder(tmp_path_factory.mktemp("sentencepiece"), build_tokenizers.sentencepiece())
    )


@pytest.fixture(scope="session")
def unigram(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(build_tokenizers.write_folder(tmp_path_factory.mktemp("unigram"), build_tokenizers.unigram()))


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece", "unigram"])
def any_tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)
