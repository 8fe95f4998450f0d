"""Round-to-nearest quantisation in numpy, written from its definition: what stored codes have to stand for."""

from __future__ import annotations

import numpy as np


def nearest(weight: np.ndarray, format: str, group: int = 0, zeros: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(f64[out, in] that the codes of ``weight`` [out, in] stand for, f64[out, in] the step between two codes)."""
    rows = weight.astype(np.float64).reshape(len(weight), -1, group or weight.shape[1])
    if not group:  # codes -127 .. 127
        step = np.abs(rows).max(-1, keepdims=True) / 127
        zero = np.zeros_like(step)
        codes = np.round(rows / step)
    else:
        top = {"int4": 15, "int2": 3}[format]
        low, high = np.minimum(rows.min(-1, keepdims=True), 0), np.maximum(rows.max(-1, keepdims=True), 0)
        assert zeros
        step = ((high - low) / top).astype(np.float16).astype(np.float64)
        step = np.where(step > 0, step, 1)  # a group of zeros
        zero = np.clip(-low / step, 0, top).astype(np.float16).astype(np.float64)
        codes = np.clip(np.round(rows / step + zero), 0, top) - zero
    step = np.broadcast_to(step, rows.shape)
    return (codes * step).reshape(weight.shape), step.reshape(weight.shape)
