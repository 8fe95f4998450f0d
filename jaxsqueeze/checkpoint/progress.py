"""Progress bars on stderr for fetching, converting and loading, as a ``source.Report``."""

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
    with Progress(*columns, console=Console(stderr=True), disable=not Console(stderr=True).is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report
