"""``jaxsqueeze serve``: a model over the OpenAI API."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxsqueeze.config import EngineConfig
from jaxsqueeze.server.config import ServerConfig

if TYPE_CHECKING:
    from jaxsqueeze.checkpoint.manifest import Manifest
    from jaxsqueeze.server.worker import EngineLike

API_KEY_VARIABLE = "JAXSQUEEZE_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, then a flag for every field of EngineConfig and ServerConfig."""
    for config in (EngineConfig, ServerConfig):
        types = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if field.name == "model":
                parser.add_argument("model", nargs="?", default=field.default, help=field.metadata["help"])
            else:
                parser.add_argument(_flag(field.name), **_options(field, types[field.name]))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _options(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"default": field.default, "help": field.metadata["help"], "dest": field.name}
    if hint is bool:
        return {**options, "action": "store_true"}
    if typing.get_origin(hint) is tuple:
        return {**options, "default": [], "action": "append", "metavar": field.name.upper()}
    if typing.get_origin(hint) is typing.Literal:
        return {**options, "choices": typing.get_args(hint)}
    types = [t for t in (typing.get_args(hint) or (hint,)) if t is not type(None)]
    return {**options, "type": types[0], "metavar": types[0].__name__.upper()}


def _config(config: type, args: argparse.Namespace) -> Any:
    def value(name: str) -> Any:
        given = getattr(args, name)
        return tuple(given) if isinstance(given, list) else given

    return config(**{f.name: value(f.name) for f in dataclasses.fields(config)})


def run(args: argparse.Namespace) -> int:
    try:
        engine_config, server_config = _config(EngineConfig, args), _config(ServerConfig, args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if key := os.environ.get(API_KEY_VARIABLE):
        server_config = dataclasses.replace(server_config, api_key=(*server_config.api_key, key))
    from jaxsqueeze.server.launch import serve

    names = server_config.served_model_name or model_names(engine_config.model)

    def on_ready(engine: EngineLike, url: str) -> None:
        announce(engine, url, names[0], bool(server_config.api_key))

    return serve(server_config, names, lambda: build_engine(engine_config), on_ready)


def model_names(source: str) -> tuple[str, ...]:
    """Names clients may use: the last part of MODEL, and MODEL as it was written."""
    path = Path(source)
    last = path.stem if path.suffix == ".gguf" else path.resolve().name
    return tuple(dict.fromkeys((last, source)))


def build_engine(config: EngineConfig) -> EngineLike:
    """Loads (and converts, the first time) the model, and compiles every step. Raises ValueError for bad input."""
    from jaxsqueeze.checkpoint.progress import progress_bars
    from jaxsqueeze.engine import Engine

    with progress_bars() as report:
        engine = Engine(config, report)
        engine.warm_up(lambda done, total: report("compiling", done, total))
    return engine


def announce(engine: Any, url: str, name: str, key_needed: bool) -> None:
    """The memory ledger, what quantisation cost, where the server listens, and a first request to copy."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(engine.ledger)
    if line := quality_line(engine.manifest):
        print(line)
    console.print(f"Ready at {url}/v1 (docs: {url}/docs). Try:\n")
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if key_needed else ""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    # Plain print: rich would wrap the line, and it is to be copied.
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n", flush=True)


def quality_line(manifest: Manifest) -> str | None:
    """What is known of the quality of quantised weights; None: they are not."""
    from jaxsqueeze.report.quality.render import headline

    if (report := manifest.quality) is not None:
        return f"Quality of {manifest.weights}, on {report['tokens']:,} tokens: {headline(report)}"
    if manifest.quantisation == "none":
        return None
    return (
        f"No quality report is stored for these {manifest.weights} weights; "
        f"`jaxsqueeze convert {manifest.source} OUT --weights ... --text FILE` makes and stores one"
    )
