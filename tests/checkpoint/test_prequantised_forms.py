"""AWQ, compressed-tensors, FP8 and MXFP4 checkpoints keep their codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.source import SourceError
from jaxsqueeze.cli import main
from jaxsqueeze.quant.scheme import STORED, Recipe
from tests.checkpoint.quantised_build import Layer, check_stored, edit, pack, write

F8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
Make = Callable[[str, int, int], Layer]


def awq(_module: str, out: int, width: int, size: int = 32) -> Layer:
    rng = np.random.default_rng(out * width)
    codes, zeros = rng.integers(0, 16, (width, out)), rng.integers(0, 16, (width // size, out))
    scales = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
    weight = (codes - zeros.repeat(size, 0)) * scales.astype(np.float64).repeat(size, 0)

    def words(values: np.ndarray) -> np.ndarray:
        packed = np.zeros((len(values), out // 8), np.uint32)
        for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            packed |= values[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
        return packed.view(np.int32)

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}, weight.T


def compressed(**weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors; ``layout`` is the format."""
    layout, activations = weights.pop("layout"), weights.pop("activations", None)
    weights = {"num_bits": 8, "type": "int", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    settings = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return {**settings, "ignore": ["lm_head", "re:.*embed.*"], "quantization_status": "compressed"}


def by_groups(bits: int, size: int | None, symmetric: bool, layout: str, scale_dtype: Any = BF16) -> Make:
    """int-quantized or pack-quantized; ``size`` None: a scale for each output, 0: for the tensor."""

    def make(_module: str, out: int, width: int) -> Layer:
        rng = np.random.default_rng(out * width)
        half, group = 2 ** (bits - 1), size or width
        codes = rng.integers(-half, half, (out, width))
        shape = (1,) if size == 0 else (out, -(-width // group))
        scales = rng.uniform(0.01, 0.02, shape).astype(scale_dtype)
        zeros = rng.integers(-half, half, shape)
        group_of = np.arange(width) // group
        factors, offsets = (x.reshape(-1, shape[-1])[:, group_of] for x in (scales.astype(np.float64), zeros))
        weight = (codes - (0 if symmetric else offsets)) * factors
        tensors = {"weight_scale": scales}
        if layout == "pack-quantized":
            tensors |= {"weight_packed": pack(codes + half, bits), "weight_shape": np.array([out, width])}
            zeros = pack((zeros + half).T, bits).T
        else:
            tensors["weight"] = codes.astype(np.int8)
            zeros = zeros.astype(np.int8)
        return {**tensors, **({} if symmetric else {"weight_zero_point": zeros})}, weight

    return make


def activation_order(module: str, out: int, width: int) -> Layer:
    """pack-quantized, each input in a group of its own choice, o_proj in order."""
    tensors, _ = by_groups(4, 32, True, "pack-quantized")(module, out, width)
    index = np.random.default_rng(width).permutation(np.arange(width) // 32).astype(np.int32)
    low = (tensors["weight_packed"].view(np.uint8)[..., None] >> np.array([0, 4], np.uint8) & 15).reshape(out, width)
    weight = (low.astype(np.float64) - 8) * tensors["weight_scale"].astype(np.float64)[:, index]
    return {**tensors, "weight_g_idx": index}, weight


def eight_bit_floats(name: str, blocks: tuple[int, int] | None, scale_dtype: Any, shape: str = "channel") -> Make:
    def make(_module: str, out: int, width: int) -> Layer:
        rng = np.random.default_rng(out * width)
        codes = rng.normal(0, 60, (out, width)).astype(F8)
        size = (-(-out // blocks[0]), -(-width // blocks[1])) if blocks else {"channel": (out, 1), "one": ()}[shape]
        if scale_dtype == ml_dtypes.float8_e8m0fnu:
            scales = np.exp2(rng.integers(-12, -6, size)).astype(scale_dtype)
        else:
            scales = rng.uniform(0.001, 0.002, size).astype(scale_dtype)
        factors = scales.astype(np.float64)
        if blocks:
            factors = factors[np.arange(out)[:, None] // blocks[0], np.arange(width) // blocks[1]]
        tensors = {"weight": codes, name: np.asarray(scales)}
        if shape == "one":
            tensors["input_scale"] = np.float32(2.0)
        return {k: np.asarray(v) for k, v in tensors.items()}, codes.astype(np.float64) * factors

    return make


def mxfp4(_module: str, out: int, width: int) -> Layer:
    rng = np.random.default_rng(out * width)
    codes, exponents = rng.integers(0, 16, (out, width)), rng.integers(110, 125, (out, width // 32))
    exponents[0, 0], exponents[1, 0] = 3, 250  # products are normal numbers of f32
    size = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    scale = np.exp2(exponents - 127.0).repeat(32, axis=1)
    blocks = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(out, -1, 16)
    return {"weight_blocks": blocks, "weight_scales": exponents.astype(np.uint8)}, np.where(
        codes < 8, size, -size
    ) * scale


INTS, PACKED, FLOATS = "int-quantized", "pack-quantized", "float-quantized"
GEMM = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
GROUP = {"strategy": "group", "group_size": 32}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
CASES: dict[str, tuple[dict[str, Any], Make, str]] = {
    "awq": ({**GEMM, "group_size": 32}, awq, "awq int4-g32-zeros"),
    "int8 channel": (
        compressed(layout=INTS, strategy="channel", activations=TOKENS),
        by_groups(8, None, True, INTS),
        "int8",
    ),
    "int8 tensor": (compressed(layout=INTS, strategy="tensor"), by_groups(8, 0, True, INTS), "int8"),
    "int8 group": (compressed(layout=INTS, **GROUP), by_groups(8, 32, True, INTS), "int8-g32"),
    "int8 group with zeros": (
        compressed(layout="naive-quantized", symmetric=False, **GROUP),
        by_groups(8, 32, False, INTS),
        "int8-g32-zeros",
    ),
    "int4 group": (
        compressed(layout=PACKED, num_bits=4, strategy="group", group_size=64),
        by_groups(4, 64, True, PACKED),
        "int4-g64",
    ),
    "int4 group with zeros": (
        compressed(layout=PACKED, num_bits=4, symmetric=False, **GROUP),
        by_groups(4, 32, False, PACKED, np.float16),
        "int4-g32-zeros",
    ),
    "int4 in activation order": (
        compressed(layout=PACKED, num_bits=4, actorder="group", **GROUP),
        activation_order,
        "int4-g32",
    ),
    "packed int8": (
        compressed(layout=PACKED, strategy="channel"),
        by_groups(8, None, True, PACKED, np.float32),
        "int8",
    ),
    "fp8 channel": (
        compressed(layout=FLOATS, type="float", strategy="channel", activations=TOKENS),
        eight_bit_floats("weight_scale", None, BF16),
        "fp8",
    ),
    "fp8 block": (
        compressed(layout="naive-quantized", type="float", strategy="block", block_structure=[48, 32]),
        eight_bit_floats("weight_scale", (48, 32), np.float32),
        "fp8-g32",
    ),
    "fp8 blocks": (
        {**FP8, "weight_block_size": [32, 64]},
        eight_bit_floats("weight_scale_inv", (32, 64), BF16),
        "fp8 fp8-g64",
    ),
    "fp8 blocks with exponents": (
        {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        eight_bit_floats("weight_scale_inv", (32, 32), ml_dtypes.float8_e8m0fnu),
        "fp8 fp8-g32",
    ),
    "fp8 tensor": (FP8, eight_bit_floats("weight_scale", None, np.float32, "one"), "fp8 fp8"),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4, "mxfp4 fp4-g32"),
}


@pytest.mark.parametrize("case", CASES)
def test_codes_are_kept(tmp_path, case):
    settings, make, words = CASES[case]
    weights = write(tmp_path / "in", settings, make)
    found, schemes = check_stored(HFFolder(tmp_path / "in"), tmp_path, weights)
    words = words if " " in words else f"compressed-tensors {words}"
    assert words in found.split(", ")
    assert any("ordered" in scheme for scheme in schemes) == (case == "int4 in activation order")


def test_what_the_checkpoint_asks_of_activations_is_said_to_be_unused(tmp_path, capsys):
    settings, make, _ = CASES["int8 channel"]
    write(tmp_path / "in", settings, make)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "activations and KV are not quantised here" in capsys.readouterr().err


def test_targets_and_ignored_modules(tmp_path):
    settings = compressed(layout=PACKED, num_bits=4, strategy="group", group_size=32)
    down = {"targets": ["re:.*down_proj"], "format": INTS, "weights": {"num_bits": 8, "strategy": "channel"}}
    settings["config_groups"]["group_1"] = down
    settings["ignore"].append("model.layers.0.self_attn.v_proj")

    def make(module: str, out: int, width: int) -> Layer:
        if module.endswith("down_proj"):
            return by_groups(8, None, True, INTS)(module, out, width)
        tensors, weight = by_groups(4, 32, True, PACKED)(module, out, width)
        if module == "model.layers.0.self_attn.v_proj":
            weight = weight.astype(np.float32)
            return {"weight": weight}, weight
        return tensors, weight

    weights = write(tmp_path / "in", settings, make)
    source = HFFolder(tmp_path / "in")
    manifest = convert(source, tmp_path / "out", name="x", recipe=Recipe(STORED))
    assert {path for path, scheme in manifest.schemes.items() if scheme.format == "int8"} == {
        "layers_0/mlp/down/weight",
        "layers_1/mlp/down/weight",
    }
    assert "layers_0/attn/qkv/weight" not in manifest.schemes
    assert manifest.notes == (
        "1 weights, like layers_0/attn/qkv/weight, were expanded: the checkpoint stores the parts of each in "
        "different ways",
    )
    check_stored(source, tmp_path, weights)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported"),
        ("awq", {"bits": 8}, "8 bits are not supported"),
        ("awq", lambda t: t.pop(f"{Q}.qzeros"), f"'{Q}.qzeros' is missing"),
        ("int4 group", {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
        ("int4 group", {"ignore": ["re:.*q_proj"]}, "although the config ignores it"),
        ("int4 group", {"ignore": ["re:("]}, "a pattern that is none"),
        ("int4 group", {"config_groups": {}}, "no config group is for"),
        ("int4 group", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ("int4 group", lambda t: t.pop(f"{Q}.weight_shape"), f"'{Q}.weight_shape' is missing"),
        ("int4 group", lambda t: t.update({f"{Q}.weight_shape": np.array([64, 32])}), r"asks for \[64, 4\]"),
        ("int4 group with zeros", lambda t: t.pop(f"{Q}.weight_zero_point"), "weight_zero_point' is missing"),
        ("int8 channel", lambda t: t.update({f"{Q}.weight_scale": np.ones(3, np.float32)}), r"asks for \[64, 1\]"),
        ("fp8 blocks", {"weight_block_size": [32]}, r"weight_block_size = \[32\]"),
        ("fp8 blocks", {"fmt": "e5m2"}, "'e5m2' are not supported"),
        ("fp8 blocks", lambda t: t.pop(f"{Q}.weight_scale_inv"), f"'{Q}.weight_scale_inv' is missing"),
        ("mxfp4", lambda t: t.pop(f"{Q}.weight_scales"), f"'{Q}.weight_scales' is missing"),
        ("mxfp4", lambda t: t.update({f"{Q}.weight_blocks": t[f"{Q}.weight_blocks"][None]}), "no matrix"),
        (
            "mxfp4",
            lambda t: t.update({f"{Q}.weight_scales": np.full_like(t[f"{Q}.weight_scales"], 255)}),
            "scales that are no numbers",
        ),
        ("awq", {"quant_method": "hqq"}, r"by the method 'hqq' are not supported \(gptq, awq, "),
        ("awq", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes int8 weights are not supported"),
        (
            "awq",
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "bitsandbytes nf4 weights are not supported; convert the unquantised checkpoint with --weights int4",
        ),
        ("awq", {"quant_method": "mxfp4"}, "says that weights are quantised by mxfp4, but none is"),
    ],
)
def test_refusals_are_one_sentence(tmp_path: Path, case: str, change: Any, message: str):
    settings, make, _ = CASES[case]
    write(tmp_path / "in", {**settings, **(change if isinstance(change, dict) else {})}, make)
    if callable(change):
        edit(tmp_path / "in", change)
    with pytest.raises(SourceError, match=message) as caught:
        convert(HFFolder(tmp_path / "in"), tmp_path / "out", name="x", recipe=Recipe(STORED))
    assert str(caught.value).startswith(str(tmp_path / "in"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
