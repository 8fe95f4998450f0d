"""Pages out of bytes: the architecture's formula, pages in proportion, and a refusal that names the number."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsqueeze.config import EngineConfig, KVDtypes
from jaxsqueeze.kv import sizing
from jaxsqueeze.kv.pool import Storage, abstract_pool, allocate, kv_bytes_per_page, storage
from jaxsqueeze.models.config import LayerConfig, ModelConfig, RopeConfig
from jaxsqueeze.sched import table_width

PAGE = 16
F32, BF16, BITS = (
    Storage(*[jnp.dtype(x)] * 2, jnp.dtype(y))
    for x, y in (("float32", "float32"), ("bfloat16", "bfloat16"), ("uint16", "bfloat16"))
)


def model(*windows: int | None, kv_heads: int = 3, head_dim: int = 64) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2 * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(LayerConfig(window=w) for w in windows),
        ropes=(RopeConfig(10_000.0, head_dim),),
        max_position=4096,
        norm_eps=1e-5,
        attn_scale=head_dim**-0.5,
    )


def widths(cfg: ModelConfig, max_model_len: int = 1024) -> tuple[int, ...]:
    sizes = {"page_size": PAGE, "max_model_len": max_model_len, "max_step_tokens": 64, "decode_steps": 4}
    return tuple(table_width(g, **sizes) for g in cfg.cache_groups())


def test_bytes_of_a_page():
    """Two of keys and values, times layers, tokens, KV heads, head_dim and bytes of a value. SmolLM2-135M: 30 layers
    of 3 heads of 64 in bf16 are 23,040 bytes a token."""
    cfg = model(*[None] * 30)
    assert kv_bytes_per_page(cfg, 30, PAGE, BF16) == 23_040 * PAGE
    assert kv_bytes_per_page(cfg, 30, PAGE, BITS) == 23_040 * PAGE
    assert kv_bytes_per_page(cfg, 30, PAGE, F32) == 2 * 23_040 * PAGE


def test_bytes_of_codes():
    """Each head of 64 values: 64 bytes and a scale of 4 in int8, 32 and 4 in int4."""
    cfg = model(*[None] * 30)

    def bytes_of(text: str) -> int:
        return kv_bytes_per_page(cfg, 30, PAGE, storage(KVDtypes.parse(text), jnp.dtype(jnp.bfloat16), "cpu"))

    heads = 30 * 3 * PAGE
    assert bytes_of("int8") == heads * 2 * 68
    assert bytes_of("k=int8,v=int4") == heads * (68 + 36)
    assert bytes_of("v=int4") == heads * (128 + 36)


def test_bf16_is_kept_as_bits_on_cpu_only():
    for dtype, platform, right in (("bfloat16", "cpu", BITS), ("bfloat16", "gpu", BF16), ("float32", "cpu", F32)):
        assert storage(KVDtypes(), jnp.dtype(dtype), platform) == right


def test_kv_that_cannot_be_is_refused():
    for text in ("int3", "k=int8,w=int4", "k=int8,v=", "", "int8,int4"):
        with pytest.raises(ValueError, match="like k=int8,v=int4, got"):
            KVDtypes.parse(text)
    with pytest.raises(ValueError, match="a float32 model cannot keep its KV in bf16"):
        storage(KVDtypes.parse("bf16"), jnp.dtype(jnp.float32), "cpu")
    odd = model(None, head_dim=5)
    with pytest.raises(ValueError, match="int4 KV packs two values a byte: it does not hold heads of 5"):
        abstract_pool(odd, (2,), PAGE, storage(KVDtypes.parse("int4"), jnp.dtype(jnp.float32), "cpu"))


def test_the_pool_is_as_large_as_was_said():
    cfg = model(8, None, 8, 8)
    size = sizing.size_pool(cfg, widths(cfg), PAGE, F32, 30_000_000)
    arrays = abstract_pool(cfg, size.num_pages, PAGE, F32)
    held = sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(arrays))
    assert held == sum(n * b for n, b in zip(size.num_pages, size.page_bytes, strict=True))
    assert held <= 30_000_000
    full, windowed = size.num_pages
    assert [k.data.shape[0] for k in arrays.k] == [windowed, full, windowed, windowed]


def test_a_pool_starts_as_zeros():
    cfg = model(8, None, kv_heads=1, head_dim=8)
    pool = allocate(abstract_pool(cfg, (3, 2), PAGE, BITS))
    for a in jax.tree.leaves(pool):
        assert a.dtype == jnp.uint16
        assert not np.asarray(a).any()
    assert pool.k[0].data.shape == (2, 1, PAGE, 8)
    assert pool.v[1].data.shape == (3, 1, PAGE, 8)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    windows=st.lists(st.sampled_from([None, 8, 100]), min_size=1, max_size=5),
    requests=st.floats(1.0, 300.0),
    max_model_len=st.sampled_from([48, 500, 1024]),
)
def test_every_group_holds_the_same_number_of_requests(windows, requests, max_model_len):
    cfg = model(*windows)
    need = widths(cfg, max_model_len)
    page_bytes = [kv_bytes_per_page(cfg, len(g.layers), PAGE, BF16) for g in cfg.cache_groups()]
    reserved, one = sum(page_bytes), sum(w * b for w, b in zip(need, page_bytes, strict=True))
    kv_bytes = reserved + int(requests * one) + 1
    size = sizing.size_pool(cfg, need, PAGE, BF16, kv_bytes)
    assert list(size.page_bytes) == page_bytes
    used = sum(n * b for n, b in zip(size.num_pages, page_bytes, strict=True))
    # Rounding loses less than one page of each group.
    assert kv_bytes - reserved < used <= kv_bytes
    assert size.full_requests == int((kv_bytes - reserved) // one)
    for pages, width in zip(size.num_pages, need, strict=True):
        assert (pages - 1) // width == size.full_requests


def test_less_than_one_request_is_refused_with_its_bytes():
    cfg = model(8, None)
    need = widths(cfg)
    page_bytes = kv_bytes_per_page(cfg, 1, PAGE, BF16)
    least = page_bytes * (sum(need) + 2)  # and page 0 of each group
    assert sizing.size_pool(cfg, need, PAGE, BF16, least).full_requests == 1
    with pytest.raises(ValueError, match=rf"takes {least} bytes of KV but {least - 1} are to be had"):
        sizing.size_pool(cfg, need, PAGE, BF16, least - 1)
    with pytest.raises(ValueError, match="-5 are to be had"):
        sizing.size_pool(cfg, need, PAGE, BF16, -5)


class TestDefaultBytes:
    @pytest.mark.parametrize(("free", "right"), [(2**40, sizing.CPU_KV_BYTES), (2**30, 2**28), (2**30 + 12345, 2**28)])
    def test_on_cpu_a_fixed_size_unless_memory_is_short(self, monkeypatch, free, right):
        monkeypatch.setattr(sizing, "_free_host_bytes", lambda: free)
        assert sizing.default_kv_bytes(EngineConfig(), step_bytes=10**9) == right

    def test_free_host_memory_is_what_the_kernel_says(self):
        assert 2**20 < sizing._free_host_bytes() < 2**46

    def test_where_there_is_no_proc_the_default_is_taken(self, monkeypatch, tmp_path):
        monkeypatch.setattr(sizing, "MEMINFO", tmp_path / "none")
        assert sizing.default_kv_bytes(EngineConfig(), step_bytes=0) == sizing.CPU_KV_BYTES

    def test_on_a_device_with_memory_of_its_own(self, monkeypatch):
        """Weights are already in use; step buffers are kept free; the rest of the fraction is KV."""

        @dataclasses.dataclass
        class Device:
            platform: str = "gpu"

            def memory_stats(self) -> dict[str, int]:
                return {"bytes_limit": 1000_000, "bytes_in_use": 300_000}

        monkeypatch.setattr(sizing.jax, "devices", lambda: [Device()])
        assert sizing.default_kv_bytes(EngineConfig(memory_fraction=0.9), step_bytes=50_000) == 550_000
