"""What a figure was measured on, and how to measure it again. Read without importing an accelerator runtime."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("jaxsqueeze", "jax", "jaxlib", "numpy", "torch", "transformers")


def describe(argv: Sequence[str]) -> dict[str, Any]:
    """Date, command, processor, memory and versions. ``argv``: the flags after ``jaxsqueeze bench``."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": repeat_command(argv),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def repeat_command(argv: Sequence[str]) -> str:
    """The command line that repeats this run; an API key is replaced by the variable that would hold it."""
    words, hide = ["jaxsqueeze", "bench"], False
    for word in argv:
        if hide or word.startswith("--api-key="):
            words.append('"$OPENAI_API_KEY"' if hide else '--api-key="$OPENAI_API_KEY"')
        else:
            words.append(shlex.quote(word))
        hide = word == "--api-key"
    return " ".join(words)


def version_of(package: str) -> str | None:
    """Of an installed package; None if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """Linux names the model in cpuinfo only; elsewhere ``platform`` knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
