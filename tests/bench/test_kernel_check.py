"""Inputs for kernels are valid, their least cost is counted right, and a wrong result does not pass as right."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsqueeze.bench.kernel_check import compare, expected
from jaxsqueeze.bench.kernel_cost import Cost, cost
from jaxsqueeze.bench.kernel_inputs import Fill, group_sizes, lengths, make, shapes
from pallas_kernels import dispatch
from pallas_kernels.kv_write.problem import Problem as KVWrite
from pallas_kernels.moe_matmul.problem import Problem as MoE
from pallas_kernels.paged_attention.problem import Problem as Attention
from pallas_kernels.quant_matmul.problem import Problem as Matmul
from pallas_kernels.sample_topk.problem import Problem as Filter
from pallas_kernels.target import CPU

PAGES = 7
PROBLEMS = {
    "attention": ("paged_attention", Attention(3, 2, 2, 2, 16, 4, 5, "bfloat16", "same", "int8", 0.25, window=7)),
    "matmul": ("quant_matmul", Matmul(3, 16, 64, "bfloat16", "int4", 32, True, "float16")),
    "experts": ("moe_matmul", MoE(19, 16, 64, "float32", "int8", E=4)),
    "write": ("kv_write", KVWrite(5, 2, 16, 4, "bfloat16", "same")),
    "write int4": ("kv_write", KVWrite(5, 2, 16, 4, "float32", "int4")),
    "filter": ("sample_topk", Filter(5, 300)),
}
FILL = Fill(1, ragged=True, poison=True, pages=PAGES)


@pytest.fixture(scope="module")
def run():
    """Arguments, the op's result and what is expected, of each problem, once."""
    results = {}

    def of(name):
        if name not in results:
            op, problem = PROBLEMS[name]
            args = make(op, problem, FILL)
            got = jax.jit(functools.partial(dispatch.call, op, "reference", problem, {}, CPU))(*args)
            results[name] = args, jax.tree.map(np.array, got), expected(op, problem, args)
        return results[name]

    return of


@pytest.mark.parametrize("name", PROBLEMS)
def test_inputs_fit_the_problem_and_plain_jax_passes(name, run):
    op, problem = PROBLEMS[name]
    args, got, want = run(name)
    described = [
        [None if x is None else (x.shape, x.dtype) for x in arrays] for arrays in (args, shapes(op, problem, FILL))
    ]
    assert described[0] == described[1]
    assert compare(op, problem, got, want).right


@pytest.mark.parametrize("name", PROBLEMS)
def test_other_seeds_give_other_inputs(name):
    op, problem = PROBLEMS[name]
    left, right = (make(op, problem, Fill(seed, pages=PAGES)) for seed in (1, 2))
    floats = [
        (a, b) for a, b in zip(left, right, strict=True) if a is not None and jnp.issubdtype(a.dtype, jnp.floating)
    ]
    assert not np.array_equal(*floats[0])


@pytest.mark.parametrize("name", ["attention", "matmul", "experts", "filter"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 100.0])
def test_one_wrong_value_is_seen(name, value, run):
    op, problem = PROBLEMS[name]
    _, got, want = run(name)
    wrong = got.copy()
    wrong[tuple(np.argwhere(np.isfinite(got) & (got != 0))[0])] = value
    assert not compare(op, problem, wrong, want).right


def test_results_left_out_are_seen(run):
    for name in ("attention", "matmul", "experts"):
        op, problem = PROBLEMS[name]
        _, got, want = run(name)
        assert not compare(op, problem, np.zeros_like(got), want).right


def test_a_word_too_few_is_seen(run):
    op, problem = PROBLEMS["filter"]
    _, got, want = run("filter")
    wrong = got.copy()
    row = np.isfinite(got).sum(axis=1).argmin()
    wrong[row, np.isfinite(got[row]).argmax()] = -np.inf
    assert not compare(op, problem, wrong, want).right


@pytest.mark.parametrize("name", ["write", "write int4"])
def test_pages_not_written_or_written_elsewhere_are_seen(name, run):
    op, problem = PROBLEMS[name]
    args, (pages, scales), want = run(name)
    assert not compare(op, problem, args[:2], want).right
    moved = np.roll(pages, 1, axis=2)
    assert not compare(op, problem, (moved, scales), want).right
    if scales is not None:
        assert not compare(op, problem, (pages, scales * 1.01), want).right


def test_junk_is_where_nothing_was_written():
    """Pages belong to one row each, and what lies behind its length is NaN."""
    op, problem = PROBLEMS["attention"]
    args = make(op, problem, FILL)
    k_pages, v_scales, table, positions = (np.asarray(args[i], np.float32) for i in (1, 7, 3, 5))
    length = lengths(problem, FILL)
    assert length[0] == problem.P * problem.page_size
    assert length[-1] == 0
    assert (positions[-1] == -1).all()
    used = table[table > 0]
    assert len(set(used)) == len(used)
    for row in range(problem.N):
        for t in range(-(-length[row] // 4) * 4):
            page, offset = int(table[row, t // 4]), t % 4
            assert np.isnan(k_pages[page, :, offset]).all() == (t >= length[row])
            assert np.isnan(v_scales[page, :, offset]).all() == (t >= length[row])
    assert np.isnan(k_pages[0]).all()


def test_least_costs():
    # q and out 2 * (3 * 2 * 4 * 16) bf16; 3 rows of 20 keys of 2 heads: K 32 bytes, V 16 + 4; of 20 keys, a window of 7
    # and 2 queries see the last 8; base, positions: 4 + 8 bytes a row; 5 pages a row in the table.
    op, problem = PROBLEMS["attention"]
    queries, keys = 2 * 2 * 3 * 2 * 4 * 16, 3 * 8 * 2 * (32 + 16 + 4)
    assert cost(op, problem, Fill(1)) == Cost(queries + keys + 3 * 12 + 3 * 5 * 4, 4 * 3 * (7 + 7) * 4 * 16)
    op, problem = PROBLEMS["matmul"]
    assert cost(op, problem, Fill(1)) == Cost(3 * 64 * 2 + 16 * 32 + 2 * 2 * 2 * 16 + 3 * 16 * 4, 2 * 3 * 16 * 64)
    op, problem = PROBLEMS["experts"]
    sizes = group_sizes(problem, FILL)
    assert sizes.sum() == 17  # of 19 rows, 19 // 8 have no expert
    assert (sizes == 0).any()
    routed = (sizes > 0).sum() * (16 * 64 + 16 * 4)
    assert cost(op, problem, FILL) == Cost(19 * 64 * 4 + 4 * 4 + routed + 19 * 16 * 4, 2 * 17 * 16 * 64)
    assert cost(*PROBLEMS["filter"], FILL) == Cost(2 * 4 * 5 * 300)
    assert cost(*PROBLEMS["write"], FILL) == Cost(2 * 5 * 2 * 16 * 2 + 5 * 8)
