"""The bytes and scales of cached records, against the formats written out by hand."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from topkapi import reference
from topkapi.layout import LATENT_FP8
from topkapi.reference.records import power_of_two_scale


def test_latent_record_is_656_bytes_in_flashmla_order() -> None:
    torch.manual_seed(0)
    latent, rope = torch.randn(3, 512), torch.randn(3, 64)
    records = reference.quantize_latent(latent, rope)
    assert records.shape == (3, 656)
    assert records.dtype == torch.uint8
    for token in range(3):
        scales = struct.unpack("<4f", bytes(records[token, 512:528].tolist()))
        for group in range(4):
            values = latent[token, 128 * group : 128 * group + 128]
            assert scales[group] == pytest.approx(float(values.abs().max()) / 448, rel=1e-7)
            codes = records[token, 128 * group : 128 * group + 128].view(torch.float8_e4m3fn)
            assert torch.equal(codes.float(), (values / scales[group]).to(codes.dtype).float())
        kept = records[token, 528:].clone().view(torch.bfloat16)
        assert torch.equal(kept, rope[token].bfloat16())


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(512, 64), (128, 32), (64, 0), (192, 96)])
def test_latent_round_trip_is_within_one_e4m3_step(latent_dim: int, rope_dim: int) -> None:
    torch.manual_seed(1)
    latent, rope = torch.randn(65, latent_dim) * 10, torch.randn(65, rope_dim).bfloat16()
    records = reference.quantize_latent(latent, rope)
    assert records.shape[1] == LATENT_FP8.bytes_per_token(latent_dim, rope_dim)
    back = reference.dequantize_latent(records, latent_dim, rope_dim)
    assert torch.equal(back[:, latent_dim:], rope.float())
    groups = latent.split(128, dim=1)
    step = torch.cat([g.abs().amax(1, keepdim=True).expand_as(g) for g in groups], dim=1) / 448
    error = (back[:, :latent_dim] - latent).abs()
    # Half a step of 3 mantissa bits, or half the smallest subnormal (2^-10) of the group's scale.
    assert bool((error <= torch.maximum(latent.abs() / 16, step * 2**-10) * 1.0001).all())


def test_zero_and_huge_groups_stay_finite_and_apart() -> None:
    latent = torch.zeros(2, 512)
    latent[0, 128:256] = 3e38
    latent[1, 5] = 1e-44
    back = reference.dequantize_latent(
        reference.quantize_latent(latent, torch.zeros(2, 64)), 512, 64
    )
    assert bool(back.isfinite().all())
    assert not back[0, :128].any()
    assert not back[0, 256:].any()
    assert torch.allclose(back[0, 128:256], torch.tensor(3e38), rtol=0.07)


def test_nan_and_inf_spoil_their_own_group_alone() -> None:
    latent = torch.ones(3, 512)
    latent[0, 0], latent[1, 200] = float("nan"), float("inf")
    records = reference.quantize_latent(latent, torch.zeros(3, 64))
    back = reference.dequantize_latent(records, 512, 64)
    assert bool(back[0, :128].isnan().all())
    assert bool(back[0, 128:512].isfinite().all())
    assert bool(back[1, 200].isnan())
    assert bool(back[1, :128].isfinite().all())
    assert bool(back[1, 256:].isfinite().all())
    assert bool(back[2].isfinite().all())


def test_index_scale_is_the_exact_power_of_two() -> None:
    edges = [448.0 * 2.0**n for n in range(-20, 20)]
    below = [math.nextafter(edge, 0.0) for edge in edges]
    torch.manual_seed(0)
    amax = torch.cat(
        (
            torch.tensor([0.0, 1e-5, 1e-4, 1.0, 1.75, 1.7500002, 3.3e38, *edges, *below]),
            torch.tensor(edges).nextafter(torch.tensor(float("inf"))),
            torch.rand(200) * 1000,
        )
    )
    got = power_of_two_scale(amax)
    for value, scale in zip(amax.tolist(), got.tolist(), strict=True):
        clamped = max(value, float(torch.tensor(1e-4)))
        # Exact: the smallest power of two that brings amax to 448 or below.
        assert math.frexp(scale)[0] == 0.5
        assert clamped <= 448 * scale
        assert clamped > 448 * scale / 2


def test_index_key_round_trip() -> None:
    torch.manual_seed(2)
    keys = torch.randn(65, 128) * torch.logspace(-8, 8, 65)[:, None]
    keys[3] = 0
    values, scales = reference.quantize_index_key(keys)
    back = reference.dequantize_index_key(values, scales)
    assert values.dtype == torch.float8_e4m3fn
    assert not back[3].any()
    # Within half a step of 3 mantissa bits, or half the smallest subnormal of the row's scale.
    bound = torch.maximum(keys.abs() / 16, scales[:, None] * 2**-10)
    assert bool(((back - keys).abs() <= bound).all())


def test_index_page_is_planar() -> None:
    """Keys of a page first, then its scales: byte offsets written out by hand."""
    torch.manual_seed(3)
    cache = torch.zeros(3, 64 * 132, dtype=torch.uint8)
    keys = torch.randn(1, 128)
    reference.write_index_key(cache, torch.tensor([64 * 2 + 5]), keys)
    values, scales = reference.quantize_index_key(keys)
    assert torch.equal(cache[2, 5 * 128 : 6 * 128], values.view(torch.uint8)[0])
    at = 64 * 128 + 5 * 4
    assert struct.unpack("<f", bytes(cache[2, at : at + 4].tolist()))[0] == float(scales)
    cache[2, 5 * 128 : 6 * 128] = 0
    cache[2, at : at + 4] = 0
    assert not cache.any()


def test_a_negative_slot_writes_to_the_dummy() -> None:
    kv_cache, index_cache = torch.zeros(4, 1, 6), torch.zeros(4, 8)
    slots = torch.tensor([-1, 2])
    reference.write_latent(kv_cache, slots, torch.ones(2, 4), torch.ones(2, 2))
    reference.write_index_key(index_cache, slots, torch.ones(2, 8))
    for cache in (kv_cache[:, 0], index_cache):
        assert cache.any(1).tolist() == [True, False, True, False]


@pytest.mark.parametrize("size", [1, 2, 32, 64, 128])
def test_hadamard_is_sylvesters_matrix(size: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = torch.randn(3, 5, size, dtype=torch.float64)
    torch.testing.assert_close(reference.hadamard(x), x @ matrix / math.sqrt(size))
    torch.testing.assert_close(reference.hadamard(reference.hadamard(x)), x)
    assert reference.hadamard(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("size", [0, 3, 96])
def test_hadamard_needs_a_power_of_two(size: int) -> None:
    with pytest.raises(ValueError, match=f"power of two as the last size, got {size}"):
        reference.hadamard(torch.zeros(2, size))
