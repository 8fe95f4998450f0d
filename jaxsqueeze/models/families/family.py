"""What a model family is to the rest of the program: two functions and the names it answers to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxsqueeze.models.config import ModelConfig
from jaxsqueeze.models.families.rules import TensorRule

HfConfig = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """``config`` maps a parsed ``config.json`` to a ModelConfig, ``tensor_plan`` maps each of our parameters to the
    checkpoint tensors it is made from. Raise ValueError for what the family does not support."""

    name: str
    architectures: tuple[str, ...]  # values of ``architectures[0]``
    model_types: tuple[str, ...]  # values of ``model_type``, used when ``architectures`` is missing
    config: Callable[[HfConfig], ModelConfig]
    tensor_plan: Callable[[ModelConfig], dict[str, TensorRule]]
