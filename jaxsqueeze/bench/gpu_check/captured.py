"""Part four: whole models again, with XLA's command buffers around the loop over steps (one launch for all of them, and
no look at the loop's condition from the host). The supervisor sets the flags: XLA reads them once a process.
"""

from __future__ import annotations

from jaxsqueeze.bench.gpu_check.case import Case, Setting
from jaxsqueeze.bench.gpu_check.whole_model import decoding_cases


def cases(setting: Setting) -> list[Case]:
    """Those with the shortest steps have most to gain, those of Llama 8B count most."""
    return decoding_cases(setting, [("llama-8b", "int4"), ("llama-1b", "int4"), ("llama-8b", "bf16")])
