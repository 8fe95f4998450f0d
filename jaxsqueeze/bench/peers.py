"""Other programs that run the same weights on the same machine. Loaded in a process of their own (see ``worker``)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jaxsqueeze.bench.phases import Emission, phases


class TransformersSubject:
    """Hugging Face transformers' own ``generate`` on PyTorch, greedy, all cores, as installed."""

    def open(self, source: str, dtype: str) -> dict[str, Any]:
        """Loads a Hugging Face folder or hub id, or a GGUF file (its weights dequantised to ``dtype``)."""
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ValueError('--peer transformers needs torch: pip install "jaxsqueeze[parity]"') from error
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        path = Path(source)
        where = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (source, {})
        self._torch = torch
        self._criteria = transformers.StoppingCriteriaList
        model = transformers.AutoModelForCausalLM.from_pretrained(where[0], dtype=getattr(torch, dtype), **where[1])
        model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)  # no EOS: full lengths
        self._model = model.eval()
        return {
            "name": f"transformers {transformers.__version__}",
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "vocab_size": model.config.get_text_config().vocab_size,
            "threads": torch.get_num_threads(),
        }

    def batch(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """One batch of equal-length prompts, ``output_tokens`` each."""
        torch, times = self._torch, []

        def stamp(_ids: Any, _scores: Any, **_kw: Any) -> Any:
            times.append(time.perf_counter())
            return torch.zeros(len(prompts), dtype=torch.bool)

        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_tokens,
                stopping_criteria=self._criteria([stamp]),
            )
        if out.shape[1] != ids.shape[1] + output_tokens:
            raise RuntimeError(f"generated {out.shape[1] - ids.shape[1]} tokens, asked for {output_tokens}")
        return phases(
            (
                Emission(t - start, row, 1, last=step == output_tokens - 1)
                for step, t in enumerate(times)
                for row in range(len(prompts))
            ),
            len(prompts),
            len(prompts[0]),
        )
