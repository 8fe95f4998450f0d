"""GGUF container and block formats, against the ``gguf`` package's own reader and against the formats' definitions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxsqueeze.checkpoint.gguf_file import SUPPORTED, GGUFFile
from jaxsqueeze.checkpoint.source import SourceError
from tests.checkpoint.build import write_gguf

Q = gguf.GGMLQuantizationType
F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, "<f2")[0])


# One block of each format to its values, element by element, as ggml's block structs define them. Slow on purpose.


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * q for q in np.frombuffer(b[2:], np.int8).tolist()]


def nibbles(raw: bytes) -> list[int]:
    return [x & 15 for x in raw] + [x >> 4 for x in raw]


def q4_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (q - 8) for q in nibbles(b[2:])]


def q4_1(b: bytes) -> list[float]:
    return [half(b[:2]) * q + half(b[2:4]) for q in nibbles(b[4:])]


def fifth_bits(raw: bytes) -> list[int]:
    bits = int.from_bytes(raw, "little")
    return [(bits >> i & 1) << 4 for i in range(32)]


def q5_0(b: bytes) -> list[float]:
    return [half(b[:2]) * ((q | h) - 16) for q, h in zip(nibbles(b[6:]), fifth_bits(b[2:6]), strict=True)]


def q5_1(b: bytes) -> list[float]:
    pairs = zip(nibbles(b[8:]), fifth_bits(b[4:8]), strict=True)
    return [half(b[:2]) * (q | h) + half(b[2:4]) for q, h in pairs]


def q2_k(b: bytes) -> list[float]:
    scales, qs, d, dmin = b[:16], b[16:80], half(b[80:82]), half(b[82:84])
    out = []
    for i in range(256):
        part, rest = divmod(i, 128)
        shift, lane = divmod(rest, 32)
        q = qs[32 * part + lane] >> 2 * shift & 3
        scale = scales[i // 16]
        out.append(d * (scale & 15) * q - dmin * (scale >> 4))
    return out


def q3_k(b: bytes) -> list[float]:
    hmask, qs, packed, d = b[:32], b[32:96], b[96:108], half(b[108:110])
    scales = []
    for i in range(16):
        low = packed[i % 8] >> 4 * (i // 8) & 15
        high = packed[8 + i % 4] >> 2 * (i // 4) & 3
        scales.append((low | high << 4) - 32)
    out = []
    for i in range(256):
        part, rest = divmod(i, 128)
        shift, lane = divmod(rest, 32)
        q = qs[32 * part + lane] >> 2 * shift & 3
        # A set high bit means nothing is subtracted.
        q -= 0 if hmask[lane] >> (4 * part + shift) & 1 else 4
        out.append(d * scales[i // 16] * q)
    return out


def scale_and_min(packed: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    low, mins = packed[j + 4] & 15, packed[j + 4] >> 4
    return low | (packed[j - 4] >> 6) << 4, mins | (packed[j] >> 6) << 4


def q4_k(b: bytes) -> list[float]:
    d, dmin, packed, qs = half(b[:2]), half(b[2:4]), b[4:16], b[16:]
    out = []
    for i in range(256):
        j, lane = divmod(i, 32)
        q = qs[32 * (j // 2) + lane] >> 4 * (j % 2) & 15
        scale, minimum = scale_and_min(packed, j)
        out.append(d * scale * q - dmin * minimum)
    return out


def q5_k(b: bytes) -> list[float]:
    d, dmin, packed, qh, qs = half(b[:2]), half(b[2:4]), b[4:16], b[16:48], b[48:]
    out = []
    for i in range(256):
        j, lane = divmod(i, 32)
        q = (qs[32 * (j // 2) + lane] >> 4 * (j % 2) & 15) | (qh[lane] >> j & 1) << 4
        scale, minimum = scale_and_min(packed, j)
        out.append(d * scale * q - dmin * minimum)
    return out


def q6_k(b: bytes) -> list[float]:
    ql, qh, scales, d = b[:128], b[128:192], np.frombuffer(b[192:208], np.int8).tolist(), half(b[208:210])
    out = []
    for i in range(256):
        part, rest = divmod(i, 128)
        quarter, lane = divmod(rest, 32)
        low = ql[64 * part + 32 * (quarter % 2) + lane] >> 4 * (quarter // 2) & 15
        high = qh[32 * part + lane] >> 2 * quarter & 3
        out.append(d * scales[i // 16] * ((low | high << 4) - 32))
    return out


# Format: its definition, and where in a block its half-precision scales are.
FORMATS: dict[gguf.GGMLQuantizationType, tuple[Callable[[bytes], list[float]], tuple[int, ...]]] = {
    Q.Q8_0: (q8_0, (0,)),
    Q.Q4_0: (q4_0, (0,)),
    Q.Q4_1: (q4_1, (0, 2)),
    Q.Q5_0: (q5_0, (0,)),
    Q.Q5_1: (q5_1, (0, 2)),
    Q.Q2_K: (q2_k, (80, 82)),
    Q.Q3_K: (q3_k, (108,)),
    Q.Q4_K: (q4_k, (0, 2)),
    Q.Q5_K: (q5_k, (0, 2)),
    Q.Q6_K: (q6_k, (208,)),
}


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, row_blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes u8[rows, bytes of a row] with finite scales."""
    rng = np.random.default_rng(seed)
    _, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, row_blocks, nbytes), np.uint8)
    for at in FORMATS[kind][1]:
        blocks[..., at : at + 2] = rng.normal(0, 0.1, (rows, row_blocks, 1)).astype("<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


def test_every_promised_type_is_tried_here() -> None:
    assert set(SUPPORTED) == {Q.F32, Q.F16, Q.BF16, *FORMATS}


@pytest.mark.parametrize("kind", FORMATS, ids=lambda k: k.name)
def test_blocks_equal_their_definition(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    raw = random_blocks(kind, rows=3, row_blocks=2)
    path = write_gguf(tmp_path / "x.gguf", "llama", {}, {"w": raw}, {"w": kind})
    file = GGUFFile(path)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    define = FORMATS[kind][0]
    expected = [v for at in range(0, raw.size, nbytes) for v in define(raw.reshape(-1)[at : at + nbytes].tobytes())]
    got = file.read(file.tensors["w"], F32)
    assert got.shape == (3, 2 * block)
    np.testing.assert_allclose(got.reshape(-1), expected, rtol=1e-5, atol=1e-6)
    rounded = file.read(file.tensors["w"], BF16)
    np.testing.assert_array_equal(rounded.view(np.uint16), got.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_plain_types(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((5, 7)).astype(np.float32)
    tensors = {"f32": values, "f16": values.astype(np.float16), "bf16": values.astype(ml_dtypes.bfloat16)}
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", "llama", {}, tensors))
    for name, stored in tensors.items():
        for dtype in (F32, BF16):
            expected = stored.astype(np.float32).astype(dtype)
            np.testing.assert_array_equal(
                file.read(file.tensors[name], dtype).astype(np.float32), expected.astype(np.float32)
            )
    # BF16 raw bytes are the bits themselves (FIELD_FAULTS G), and no copy of them.
    bits = file.read(file.tensors["bf16"], BF16)
    np.testing.assert_array_equal(bits.view(np.uint16), tensors["bf16"].view(np.uint16))
    assert not bits.flags.owndata


def test_header_equals_the_packages_reader(tmp_path: Path) -> None:
    metadata = {
        "general.name": "näme 名",
        ".flag": True,
        ".count": 7,
        ".rate": 1e-5,
        ".ids": [1, 2, 3],
        ".floats": [0.5, -1.5],
        ".words": ["a", "ü", ""],
    }
    path = write_gguf(tmp_path / "x.gguf", "llama", metadata, {"w": np.zeros((4, 6, 2), np.float32)})
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        mine = ours.metadata[key]
        assert (mine.tolist() if isinstance(mine, np.ndarray) else mine) == pytest.approx(field.contents())
    assert ours.metadata["llama.rate"] == 1e-5  # the decimal that was meant
    for tensor in theirs.tensors:
        place = ours.tensors[tensor.name]
        assert place.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (place.start, place.nbytes) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.parity  # the package's reader takes ten seconds
def test_demo_header_equals_the_packages_reader(demo_gguf: Path) -> None:
    ours, theirs = GGUFFile(demo_gguf), gguf.GGUFReader(demo_gguf)
    assert ours.metadata["tokenizer.ggml.tokens"] == theirs.fields["tokenizer.ggml.tokens"].contents()
    assert {n: (t.start, t.nbytes, t.kind) for n, t in ours.tensors.items()} == {
        t.name: (t.data_offset, t.n_bytes, t.tensor_type) for t in theirs.tensors
    }


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 60, 200, -1])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    path = write_gguf(tmp_path / "x.gguf", "llama", {".ids": list(range(50))}, {"w": np.zeros((4, 8), np.float32)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"x\.gguf"):
        GGUFFile(path)


def test_damaged_headers_are_refused(tmp_path: Path) -> None:
    """No byte of the header, set to anything, may crash, hang, or read past the file."""
    path = write_gguf(tmp_path / "x.gguf", "llama", {".ids": [1, 2], ".s": "text"}, {"w": np.zeros((2, 4), np.float32)})
    good = path.read_bytes()
    for at in range(len(good) - 32):
        for value in (0x00, 0x7F, 0xFF):
            path.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
            with contextlib.suppress(SourceError):
                file = GGUFFile(path)
                for tensor in file.tensors.values():
                    file.read(tensor, F32)


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    _, nbytes = gguf.GGML_QUANT_SIZES[Q.IQ4_XS]
    raw = np.zeros((2, nbytes), np.uint8)
    path = write_gguf(tmp_path / "x.gguf", "llama", {}, {"w": raw}, {"w": Q.IQ4_XS})
    with pytest.raises(SourceError, match=r"'w' has type IQ4_XS.*Q6_K"):
        GGUFFile(path)
