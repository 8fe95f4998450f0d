"""The text that a calibration reads: a file, cut into windows of tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tokenizers

from jaxsqueeze.checkpoint.source import SourceError

if TYPE_CHECKING:
    from jaxsqueeze.checkpoint.assemble import Job  # imports flax

WINDOW = 512  # tokens, or what the model holds if that is less
ROWS = 4  # windows that a layer sees at once
DEFAULT_TOKENS = 32768


@dataclasses.dataclass(frozen=True)
class Calibration:
    """``text``: UTF-8 file. ``tokens``: how many of its tokens are read, spread evenly over it."""

    text: Path
    tokens: int = DEFAULT_TOKENS


def windows(job: Job, calibration: Calibration) -> np.ndarray:
    """i32[n, length], n a multiple of ROWS; each starts with the model's first token if it has one. SourceError for a
    text that cannot be read or is too short, and for a source without a tokenizer."""
    if "tokenizer.json" not in job.tokenizer_files:
        raise SourceError(f"{job.source.path}: has no tokenizer.json, so no text can calibrate it; add the file")
    try:
        text = calibration.text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{calibration.text}: not UTF-8 ({error.reason}); give a text file") from error
    except OSError as error:
        raise SourceError(f"{calibration.text}: {error.strerror}; give a text file") from error
    tokenizer = tokenizers.Tokenizer.from_buffer(job.tokenizer_files["tokenizer.json"])
    tokenizer.no_truncation()
    ids = np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    length, bos = min(WINDOW, job.config.max_position), job.config.bos_token_id
    own = length - (bos is not None)
    count = min(len(ids), calibration.tokens) // own // ROWS * ROWS
    if not count:
        raise SourceError(
            f"{calibration.text}: has {len(ids)} tokens, and calibration needs {ROWS * own} or more; give a longer text"
        )
    starts = np.linspace(0, len(ids) - own, count).astype(np.int64)
    cut = ids[starts[:, None] + np.arange(own)]
    return cut if bos is None else np.concatenate([np.full((count, 1), bos, np.int32), cut], axis=1)
