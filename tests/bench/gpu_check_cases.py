"""Cases for the supervisor's tests: what can happen to a worker. Not a test itself: workers import it by name."""

from __future__ import annotations

import os
import time

from jaxsqueeze.bench.gpu_check.case import Case, Setting


def fails():
    raise ValueError("first line\nsecond line")


def not_covered():
    raise NotImplementedError("only on Tuesdays")


def dies():
    os.abort()


def hangs():
    time.sleep(600)


def loses_the_device():
    raise RuntimeError("INTERNAL: CUDA error: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")


def nothing():
    return None


def cases(setting: Setting) -> list[Case]:
    def case(name, run=nothing, prepare=nothing):
        return Case(name, prepare, lambda made: {"quick": setting.quick, "made": made, "got": run()})

    return [
        case("one", prepare=lambda: 17),
        case("fails", fails),
        case("not covered", prepare=not_covered),
        case("loses", loses_the_device),
        case("two"),
        case("hangs", hangs),
        case("dies", dies),
        case("three"),
    ]
