"""Cases of which one kills the process while it is compiled beside others. Not a test itself: workers import it."""

from __future__ import annotations

import os

from jaxsqueeze.bench.gpu_check.case import Case, Setting


def cases(setting: Setting) -> list[Case]:
    return [Case(str(i), os.abort if i == 1 else int, lambda made: {"made": made}) for i in range(3)]
