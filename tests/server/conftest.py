import pytest

from jaxsqueeze.text.tokenizer import Tokenizer
from tests.server.running import Running, run_server, wait_ready
from tests.server.scripted_engine import ScriptedEngine
from tests.text import build_tokenizers


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = build_tokenizers.write_folder(tmp_path_factory.mktemp("tokenizer"), build_tokenizers.byte_level())
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    folder = build_tokenizers.write_folder(tmp_path_factory.mktemp("sentencepiece"), build_tokenizers.sentencepiece())
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def _shared(tokenizer):
    running = wait_ready(run_server(ScriptedEngine(tokenizer)))
    yield running
    running.stop()


@pytest.fixture
def server(_shared) -> Running:
    """The shared server, with a clean engine script."""
    engine = _shared.engine
    engine.scripts.clear()
    engine.seen.clear()
    engine.aborted.clear()
    engine.step_seconds = 0.0
    engine.before_step = lambda requests: None
    engine.before_add = lambda request: None
    return _shared


@pytest.fixture
def start(tokenizer):
    """Starts servers of one's own: ``start(config=..., build=..., engine=...)``."""
    started: list[Running] = []

    def make(config=None, build=None, engine=None, ready=True) -> Running:
        running = run_server(engine or ScriptedEngine(tokenizer), config, build)
        started.append(running)
        return wait_ready(running) if ready else running

    yield make
    for running in started:
        running.stop()
