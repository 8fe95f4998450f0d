"""A server process around the scripted engine: ``serve_scripted.py TOKENIZER_FOLDER [build_seconds] [drain_seconds]
[fail]``. Prints its URL when ready."""

import sys
import time

from jaxsqueeze.server.config import ServerConfig
from jaxsqueeze.server.launch import serve
from jaxsqueeze.text.tokenizer import Tokenizer
from tests.server.scripted_engine import ScriptedEngine


def build():
    time.sleep(float(sys.argv[2]))
    if sys.argv[4:] == ["fail"]:
        raise ValueError("model.safetensors is truncated: download it again")
    if sys.argv[4:] == ["bug"]:
        raise RuntimeError("planted")
    engine = ScriptedEngine(Tokenizer.load(sys.argv[1]))
    engine.step_seconds = 0.02
    return engine


if __name__ == "__main__":
    config = ServerConfig(port=0, drain_seconds=float(sys.argv[3]))
    sys.exit(serve(config, ("scripted",), build, lambda engine, url: print(url, flush=True)))
