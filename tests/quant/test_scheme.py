"""What a user asks for, and which weights that means."""

from __future__ import annotations

import pytest

from jaxsqueeze.quant.scheme import Recipe, Scheme, from_json, to_json

PATHS = [
    "embed/weight",
    "layers_0/attn/qkv/weight",
    "layers_0/attn/qkv/bias",
    "layers_0/input_norm/scale",
    "layers_0/mlp/down/weight",
    "layers_1/attn/qkv/weight",
    "lm_head/weight",
]
LAYERS = ["layers_0/attn/qkv/weight", "layers_0/mlp/down/weight", "layers_1/attn/qkv/weight"]


def test_matmul_weights_of_layers_and_nothing_else():
    assert Recipe().schemes(PATHS) == {}
    assert Recipe("int8").schemes(PATHS) == dict.fromkeys(LAYERS, Scheme("int8"))
    assert Recipe("int2", 32, True).schemes(PATHS) == dict.fromkeys(LAYERS, Scheme("int2", 32, True, "float16"))


def test_patterns():
    kept = Recipe("fp8", keep=("layers_1/*", "*/down/*"), also=("lm_head/weight",))
    assert list(kept.schemes(PATHS)) == [LAYERS[0], "lm_head/weight"]
    with pytest.raises(ValueError, match="no weight matches 'layer_1/"):
        Recipe("int8", keep=("layer_1/*",)).schemes(PATHS)
    with pytest.raises(ValueError, match="no weight matches"):  # a norm is no weight
        Recipe("int8", also=("*/scale",)).schemes(PATHS)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weights": "int3"}, "weights must be one of stored, bf16, int8, int4, int2, fp8, got 'int3'"),
        ({"weights": "int4", "group": 48}, "group size must be one of 32, 64, 128, got 48"),
        ({"weights": "int8", "zeros": True}, "zero points are for int4 and int2 weights, not for int8"),
    ],
)
def test_what_does_not_exist_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Recipe(**fields)


def test_names_and_json():
    schemes = {"a": Scheme("int8"), "b": Scheme("int4", 64, True, "float16")}
    assert [str(s) for s in schemes.values()] == ["int8", "int4-g64-zeros"]
    assert from_json(to_json(schemes)) == schemes
