"""Rotated inputs: the product stays what it was, outliers do not, and a checkpoint keeps it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsqueeze.checkpoint.convert import convert
from jaxsqueeze.checkpoint.hf import HFFolder
from jaxsqueeze.checkpoint.manifest import read_manifest
from jaxsqueeze.checkpoint.store import load_params
from jaxsqueeze.cli import main
from jaxsqueeze.quant.qtensor import quantise
from jaxsqueeze.quant.rotation import rotate
from jaxsqueeze.quant.scheme import Recipe, Scheme
from pallas_kernels.quant_matmul.api import quant_matmul
from pallas_kernels.target import CPU

ROTATED = Scheme("int8", rotated=True)


@pytest.mark.parametrize(("width", "block"), [(128, 64), (96, 32), (40, 8), (7, 1)])
def test_blocks_are_multiplied_with_a_hadamard_matrix(width, block):
    sign = [[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    matrix = np.kron(np.eye(width // block), np.array(sign)) / np.sqrt(block)
    x = np.random.default_rng(0).normal(size=(5, width))
    np.testing.assert_allclose(rotate(jnp.asarray(x)), x @ matrix, atol=1e-5)
    np.testing.assert_allclose(rotate(rotate(jnp.asarray(x))), x, atol=1e-5)


def outliers(rows: int) -> np.ndarray:
    """Inputs of which three are always many times larger."""
    x = np.random.default_rng(1).normal(size=(rows, 192)).astype(np.float32)
    x[:, [5, 77, 150]] *= 60
    return x


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_a_cpu_multiplies_in_integers_and_outliers_cost_little(rows):
    x, weight = outliers(rows), np.random.default_rng(2).normal(size=(64, 192)).astype(np.float32)
    weight[:, [5, 77, 150]] /= 60  # no output is made of outliers alone
    right = x.astype(np.float64) @ weight.T.astype(np.float64)
    plain, rotated = quantise(jnp.asarray(weight), Scheme("int8")), quantise(jnp.asarray(weight), ROTATED)

    def error(found) -> float:
        return np.linalg.norm(found - right) / np.linalg.norm(right)

    in_integers = rotated.matmul(jnp.asarray(x), CPU)
    not_rotated = quant_matmul(jnp.asarray(x), plain.codes, plain.scales, format="w8a8", target=CPU)
    assert 0 < error(in_integers) < 0.4 * error(not_rotated)
    # Each token's rotated inputs have codes of int8, by its largest: what is multiplied, computed anew.
    turned = np.asarray(rotate(jnp.asarray(x)), np.float64)
    step = np.abs(turned).max(axis=1, keepdims=True) / 127
    expected = np.round(turned / step) * step @ (np.asarray(rotated.codes, np.float64).T * np.asarray(rotated.scales))
    np.testing.assert_allclose(in_integers, expected, atol=2e-3 * np.abs(right).max())


def test_dequantised_weights_and_rows_are_turned_back():
    weight = np.random.default_rng(3).normal(size=(20, 96)).astype(np.float32)
    rotated = quantise(jnp.asarray(weight), ROTATED)
    assert np.linalg.norm(rotated.dequantise() - weight) / np.linalg.norm(weight) < 0.01
    np.testing.assert_allclose(rotated.take(jnp.array([4, 4, 19])), rotated.dequantise()[jnp.array([4, 4, 19])])


def test_a_checkpoint_keeps_it(hf_checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    folder = hf_checkpoint()
    convert(HFFolder(folder), out, name="q", recipe=Recipe("int8", rotate=True))
    assert set(read_manifest(out).schemes.values()) == {ROTATED}
    assert read_manifest(out).quantisation == "int8-rotated"
    assert load_params(out)["layers_0"]["mlp"]["down"]["weight"].rotated
    assert main(["convert", str(folder), str(tmp_path / "other"), "--weights", "int4", "--rotate"]) == 2
    assert capsys.readouterr().err == "error: a rotation is for int8 weights, not for int4\n"
