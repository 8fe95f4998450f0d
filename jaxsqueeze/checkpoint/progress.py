"""Progress bars on stderr for fetching, converting, loading and compiling, as a ``source.Report``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from jaxsqueeze.checkpoint.source import Report


@contextlib.contextmanager
def progress_bars() -> Iterator[Report]:
    """One bar per stage, made when the stage first reports; plain silence where stderr is not a terminal."""
    columns = (TextColumn("{task.description:>12}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report
