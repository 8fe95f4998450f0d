"""Part three: decode of whole models with random weights, through the Runner's compiled steps.

A step's bytes, its weights and the keys and values of its rows, over its time are the bandwidth that is reached.
"""

from __future__ import annotations

import gc
from typing import Any

from jaxsqueeze.bench import random_model
from jaxsqueeze.bench.gpu_check import trace
from jaxsqueeze.bench.gpu_check.case import Case, Figures, Setting
from jaxsqueeze.bench.gpu_check.decoding import FEW, Session, Size

QUICK = Size(rows=(2,), prompt=40, steps=32, repeats=1, prefill_tokens=64)
TRACED = "llama-8b", "bf16"  # also goes to a profiler trace
WEIGHTS = {"bf16": None, "int8": "int8", "int4": "int4"}


def cases(setting: Setting) -> list[Case]:
    """A session's programs need the device to themselves while they are made: a case does all by itself."""
    models = [(model, weights) for model in ("llama-8b", "llama-1b") for weights in WEIGHTS]
    return decoding_cases(setting, models, traced=TRACED)


def decoding_cases(
    setting: Setting, models: list[tuple[str, str]], traced: tuple[str, str] | None = None
) -> list[Case]:
    """Of these models and their weights' formats; with ``quick`` of a tiny one instead, also traced if any is."""
    if setting.quick:
        return [_case("tiny", "int8", QUICK, "float32", setting, traced=traced is not None)]
    return [_case(*m, Size(), "bfloat16", setting, traced=m == traced) for m in models]


def _case(model: str, weights: str, size: Size, dtype: str, setting: Setting, *, traced: bool) -> Case:
    def run(_: Any) -> Figures:
        gc.collect()  # the model before this one may still be held by its own cycles
        session = Session(random_model.SHAPES[model], WEIGHTS[weights], size, dtype)
        compile_s = session.compile()
        prefill = session.prefill()
        by_rows = []
        for rows in size.rows:
            figures = session.decode(rows)
            per_step = figures.few / FEW
            by_rows.append(
                {
                    "rows": rows,
                    "tokens_per_s": rows / per_step,
                    "step_us": per_step * 1e6,
                    "device_us": figures.step * 1e6,
                    "gb_per_s": figures.step_bytes / per_step / 1e9,
                    "host_gap": figures.gap(figures.few, FEW),
                    "host_gap_single": figures.gap(figures.one, 1),
                    "spread": figures.spread,
                }
            )
        profile = _profile(session, size.rows[0], setting) if traced else {}
        return {
            "model": model,
            "weights": weights,
            "compile_s": compile_s,
            "prefill_tokens_per_s": prefill,
            "weight_gb": random_model.step_bytes(session.params) / 1e9,
            "by_rows": by_rows,
            **profile,
        }

    return Case(f"{model} {weights}", lambda: None, run)


def _profile(session: Session, rows: int, setting: Setting) -> Figures:
    try:
        return trace.of(session, rows, setting.out)
    except Exception as error:  # a profiler that does not work must not cost the figures
        return {"no_trace": f"{type(error).__name__}: {error}"[:300]}
