"""The ``jaxsqueeze`` command. Each subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``;
``scripts/<name>.py`` calls the same module, so both take the same flags."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "serve": "serve a model over the OpenAI API",
    "convert": "convert a checkpoint to the engine's own format",
    "eval": "compare a model with a reference on a text: perplexity, KL, flips",
    "bench": "measure the engine, or any OpenAI-compatible server",
}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds a flag's default to its help, unless there is nothing to say: None, off, or a list that is empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, False, []) else action.help


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code (2: bad input, one sentence on stderr)."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="jaxsqueeze", description=__doc__.split(".")[0])
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        # Only the chosen command's module is imported: `--help` stays quick.
        sub = subparsers.add_parser(name, help=text, formatter_class=_Help)
        if argv[:1] == [name]:
            module = importlib.import_module(f"jaxsqueeze.cli.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return args.run(args)
