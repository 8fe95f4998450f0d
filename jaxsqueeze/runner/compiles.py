"""Counts XLA compilations of this process: after warm-up there must be none."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """``count``: programs compiled (or read from the persistent cache) since construction."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **kwargs: object) -> None:
        self.count += event == _EVENT
