"""Flags of ``jaxsqueeze serve``: made from the two config classes, none forgotten."""

import argparse
import dataclasses

import pytest

from jaxsqueeze.cli import serve
from jaxsqueeze.config import EngineConfig
from jaxsqueeze.server.config import ServerConfig
from tests.server.scripted_engine import ScriptedEngine


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_defaults_are_the_dataclass_s(config):
    assert serve._config(config, parse()) == config()


def test_every_field_is_a_flag():
    fields = {f.name for c in (EngineConfig, ServerConfig) for f in dataclasses.fields(c)}
    assert fields <= set(vars(parse()))


def test_values_arrive():
    args = parse(
        *["folder", "--dtype", "float32", "--max-slots", "3", "--kv-bytes", "1000", "--memory-fraction", "0.5"],
        *["--deterministic", "--host", "0.0.0.0", "--port", "81", "--api-key", "a", "--api-key", "b"],
        *["--served-model-name", "m", "--drain-seconds", "1.5", "--max-model-len", "99"],
    )
    engine, server = serve._config(EngineConfig, args), serve._config(ServerConfig, args)
    assert (engine.model, engine.dtype, engine.max_slots, engine.kv_bytes) == ("folder", "float32", 3, 1000)
    assert (engine.memory_fraction, engine.deterministic, engine.max_model_len) == (0.5, True, 99)
    assert (server.host, server.port, server.api_key) == ("0.0.0.0", 81, ("a", "b"))
    assert (server.served_model_name, server.drain_seconds) == (("m",), 1.5)


@pytest.mark.parametrize("argv", [["--dtype", "float8"], ["--max-slots", "many"], ["--no-such-flag"]])
def test_wrong_flags_exit_with_two(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2


@pytest.mark.parametrize(
    "argv",
    [
        *(["--max-slots", "0"], ["--max-slots", "100000000"], ["--page-size", "3"], ["--seed", "-1"]),
        *(["--port", "70000"], ["--api-key", ""], ["--drain-seconds", "nan"]),
    ],
)
def test_wrong_values_are_one_sentence_and_exit_with_two(argv, capsys):
    assert serve.run(parse(*argv)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_names_clients_may_use():
    assert serve.model_names("demo") == ("demo",)
    assert serve.model_names("org/name") == ("name", "org/name")
    assert serve.model_names("/a/b/tiny-Q4.gguf") == ("tiny-Q4", "/a/b/tiny-Q4.gguf")


def test_the_key_may_come_from_the_environment(monkeypatch):
    seen = {}
    monkeypatch.setenv(serve.API_KEY_VARIABLE, "secret")
    monkeypatch.setattr("jaxsqueeze.server.launch.serve", lambda config, *rest: seen.update(key=config.api_key) or 0)
    assert serve.run(parse("--api-key", "a")) == 0
    assert seen["key"] == ("a", "secret")


def test_the_headline_of_quantised_weights(tokenizer, capsys):
    engine = ScriptedEngine(tokenizer)
    serve.announce(engine, "http://h:1", "m", False)
    assert "uality" not in capsys.readouterr().out
    engine.manifest = dataclasses.replace(engine.manifest, quantisation="int4-g64", source="org/name")
    serve.announce(engine, "http://h:1", "m", False)
    line = (
        "No quality report is stored for these int4-g64 weights; `jaxsqueeze convert org/name OUT --weights ... --text "
    )
    assert line in capsys.readouterr().out
    every, rare = {"ref_perplexity": 20.0, "perplexity": 20.5, "kl_p99.9": 0.75}, {"flips": 0.02}
    report = {"candidate": "c", "reference": "r", "tokens": 4096, "all": every, "rare": rare}
    engine.manifest = dataclasses.replace(engine.manifest, quality=report)
    serve.announce(engine, "http://h:1", "m", False)
    printed = capsys.readouterr().out
    figures = "perplexity +2.50%, KL p99.9 0.750 nats, 2.00% of sure rare tokens flipped"
    assert f"Quality of int4-g64, on 4,096 tokens: {figures}\n" in printed
    assert "No quality report" not in printed
