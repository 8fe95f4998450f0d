"""Starts and stops jax profiler traces, for XProf or Perfetto."""

from __future__ import annotations

import datetime
from pathlib import Path

from jaxsqueeze.checkpoint.demo import cache_folder
from jaxsqueeze.server.errors import ApiError


class Profiler:
    """At most one trace at a time in a process (the profiler's own limit)."""

    def __init__(self, folder: str | None) -> None:
        self._folder = Path(folder) if folder else cache_folder() / "profiles"
        self.trace: Path | None = None

    def start(self) -> Path:
        import jax

        if self.trace is not None:
            raise ApiError(409, f"a trace is being written to {self.trace}: POST /stop_profile first")
        trace = self._folder / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
        trace.mkdir(parents=True)
        jax.profiler.start_trace(trace, create_perfetto_trace=True)
        self.trace = trace
        return trace

    def stop(self) -> Path:
        import jax

        if self.trace is None:
            raise ApiError(409, "no trace is being written: POST /start_profile first")
        trace, self.trace = self.trace, None
        jax.profiler.stop_trace()
        return trace
