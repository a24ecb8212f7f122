"""Every case of every operation through the Triton kernels on a GPU, and what only a GPU shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import (
    EXACT_FP8_CASES,
    RECORD_CASES,
    SELECT_CASES,
    SPARSE_MLA_CASES,
    TOPK_CASES,
    WIDE_SPARSE_MLA_CASES,
    RecordCase,
    SelectCase,
    SparseMlaCase,
    TopkCase,
)
from tolerances import OUTPUT, Tolerance, assert_close
from topkapi import ops, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda"
ATTENDED = SPARSE_MLA_CASES + EXACT_FP8_CASES + WIDE_SPARSE_MLA_CASES


def named(case: Any) -> str:
    return str(case.name)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("case", ATTENDED, ids=named)
def test_sparse_mla(case: SparseMlaCase, phase: Any) -> None:
    inputs = case.make(DEVICE)
    out, lse = ops.sparse_mla(**inputs, phase=phase, kernel="triton")
    want_out, want_lse = case.expected(inputs)
    tolerance = OUTPUT[case.dtype]
    bound = Tolerance(tolerance.lse, tolerance.lse, 0.0)
    if case.dtype == torch.float32:
        # Sums over 576 dims run one after the other, in fp32.
        tolerance, bound = Tolerance(2e-5, 1e-4, 0.0), Tolerance(2e-5, 2e-5, 0.0)
    elif case.cache == torch.uint8 and case.heads >= 64:
        # fp8 records become bf16 operands: a score carries one rounding of each latent value.
        bound = Tolerance(3e-3, 3e-3, 0.0)
    assert_close("lse", lse, want_lse, bound)
    assert_close("out", out, want_out, tolerance)


@pytest.mark.parametrize("case", TOPK_CASES, ids=named)
def test_topk(case: TopkCase) -> None:
    inputs = case.make(DEVICE)
    case.compare(ops.topk(**inputs, kernel="triton"), inputs)


@pytest.mark.parametrize("case", SELECT_CASES, ids=named)
def test_indexer_logits_and_select(case: SelectCase) -> None:
    inputs = case.make(DEVICE)
    for output in ("slots", "positions"):
        got = ops.select(**inputs, output=output, kernel="triton")  # type: ignore[arg-type]
        case.compare(got, inputs, output)  # type: ignore[arg-type]
    del inputs["k"]
    case.compare_logits(ops.indexer_logits(**inputs, kernel="triton"), inputs)


@pytest.mark.parametrize("heads", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16], ids=str)
def test_logits_of_long_prompts(heads: int, dtype: torch.dtype) -> None:
    """Several tiles of rows and positions over fp8 keys; requests that end inside a tile.

    sm90's fp8 units keep about 13 bits of a sum.
    """
    case = SelectCase("prompts", (301, 40, 0, 129), (1000, 40, 0, 2100), heads=heads,
                      cache=torch.uint8, padded_rows=3)  # fmt: skip
    inputs = case.make(DEVICE, dtype)
    del inputs["k"]
    got = ops.indexer_logits(**inputs, kernel="triton")
    inputs["q"] = inputs["q"].float()
    if dtype == torch.float8_e4m3fn:
        want = case.expected_logits(inputs)
        finite = want.isfinite()
        assert torch.equal(got.cpu().isfinite(), finite)
        error = (got.cpu().double() - want)[finite].abs().max() / want[finite].abs().max()
        assert error < 1e-3, f"error {float(error):.1e}"
    else:
        case.compare_logits(got, inputs)


def differing(got: torch.Tensor, want: torch.Tensor) -> list[tuple[int, int, int]]:
    """Bytes that differ, up to the sign of an e4m3 NaN: a GPU has another for inf / inf."""
    got, want = got.cpu().flatten(), want.cpu().flatten()
    nan = ((got & 0x7F) == 0x7F) & ((want & 0x7F) == 0x7F)
    places = (~((got == want) | nan)).nonzero().flatten()[:20].tolist()
    return [(place, int(got[place]), int(want[place])) for place in places]


@pytest.mark.parametrize("case", RECORD_CASES, ids=named)
def test_records(case: RecordCase) -> None:
    inputs = case.make(DEVICE)
    want = case.written(inputs)
    kv_cache, index_cache, slots = inputs["kv_cache"], inputs["index_cache"], inputs["slots"]
    ops.write_latent(kv_cache, slots, inputs["latent"], inputs["rope"], kernel="triton")
    ops.write_index_key(index_cache, slots, inputs["keys"], kernel="triton")
    for name, cache in want.items():
        if cache.dtype == torch.uint8:
            assert not differing(inputs[name], cache), f"{case.name}: {name}"
        else:
            case.compare(name, inputs[name], cache)
    some = torch.cat((torch.full_like(slots[:1], -1), slots))
    got = ops.gather_latent(kv_cache, some, v_dim=case.latent, dtype=torch.float32, kernel="triton")
    want_rows = reference.gather_latent(
        kv_cache.cpu(), some.cpu(), v_dim=case.latent, dtype=torch.float32
    )
    case.compare("gathered", got, want_rows)


@pytest.mark.parametrize(
    ("rows", "width"), [(3, 2**20), (1, 65536), (8, 131072), (65, 131072), (700, 40000)]
)
@pytest.mark.parametrize("kind", ["normal", "close", "plateau", "periodic"])
def test_topk_of_long_rows(rows: int, width: int, kind: str) -> None:
    """Exact, wherever the sample misjudges: values close together, plateaus, periods."""
    generator = torch.Generator(DEVICE).manual_seed(rows)
    x = torch.randn(rows, width, generator=generator, device=DEVICE)
    if kind == "close":
        x = 1.0 + x * 1e-6
    elif kind == "plateau":
        x = x.clamp_min(1.5)
    elif kind == "periodic":
        x = x + 10.0 * (torch.arange(width, device=DEVICE) % 64 == 0)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator, device=DEVICE).int()
    lengths[0] = width
    got = ops.topk(x, lengths, 2048, kernel="triton").long()
    inside = torch.arange(width, device=DEVICE) < lengths[:, None]
    ranked = x.masked_fill(~inside, float("-inf")).sort(dim=1, descending=True, stable=True)
    want = ranked.indices[:, :2048]
    want = torch.where(torch.arange(2048, device=DEVICE) < lengths[:, None], want, width)
    want = want.sort(dim=1).values
    assert torch.equal(got, torch.where(want == width, -1, want))


@pytest.mark.parametrize("values", ["normal", "integers"])
@pytest.mark.parametrize("lengths", [(40000,), (65536, 900, 33000, 2048), (50001,) * 7])
def test_select_of_a_few_long_contexts(lengths: tuple[int, ...], values: Any) -> None:
    """Three launches that overlap: none reads what the one before it has yet to write."""
    case = SelectCase("few", (1,) * len(lengths), lengths, heads=64, cache=torch.uint8, k=2048,
                      values=values, padded_rows=1)  # fmt: skip
    inputs = case.make(DEVICE, torch.float8_e4m3fn)
    k = inputs.pop("k")
    context = inputs["context"]
    logits = ops.indexer_logits(**inputs, kernel="triton")
    want = context.slots(ops.topk(logits, context.lengths, k, kernel="torch"))
    for _ in range(10):
        assert torch.equal(ops.select(**inputs, k=k, kernel="triton"), want)


def test_addresses_past_two_gigabytes() -> None:
    """The last records of caches that 32 bits cannot address, against the same in a small cache."""
    slots = torch.tensor([[3_400_000, 7, 3_399_999, -1]], dtype=torch.int32, device=DEVICE)
    near = torch.tensor([[1, 2, 3, -1]], dtype=torch.int32, device=DEVICE)
    for dtype, width in ((torch.uint8, 656), (torch.bfloat16, 576)):
        kv_cache = torch.zeros(3_400_001, 1, width, dtype=dtype, device=DEVICE)
        small = torch.zeros(4, 1, width, dtype=dtype, device=DEVICE)
        latent = torch.randn(3, 512, device=DEVICE).bfloat16()
        rope = torch.randn(3, 64, device=DEVICE).bfloat16()
        ops.write_latent(kv_cache, slots[0, :3].long(), latent, rope, kernel="triton")
        ops.write_latent(small, near[0, :3].long(), latent, rope, kernel="triton")
        assert small[1:].any()
        assert torch.equal(kv_cache[slots[0, :3].long()], small[1:])
        q = torch.randn(1, 16, 576, device=DEVICE).bfloat16()
        far = ops.sparse_mla(q, kv_cache, slots, scale=0.1, kernel="triton")
        want = ops.sparse_mla(q, small, near, scale=0.1, kernel="triton")
        assert all(torch.equal(a, b) for a, b in zip(far, want, strict=True))
        del kv_cache
        torch.cuda.empty_cache()


def test_a_graph_replays_on_new_contents() -> None:
    """Captured once, `select` and `sparse_mla` follow new lengths and values without the host."""
    case = SelectCase("graph", (1,) * 8, (5000,) * 8, k=512, cache=torch.uint8,
                      dtype=torch.bfloat16)  # fmt: skip
    inputs = case.make(DEVICE)
    kv_cache = torch.randn(8 * 5100 + 6400, 1, 576, device=DEVICE).bfloat16()
    q = torch.randn(8, 16, 576, device=DEVICE).bfloat16()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        slots = ops.select(**inputs, kernel="triton")
        return slots, ops.sparse_mla(q, kv_cache, slots, scale=0.1, kernel="triton")[0]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for length in (5000, 700, 3, 0):
        inputs["context"].lengths.fill_(length)
        inputs["q"].normal_()
        q.normal_()
        graph.replay()
        fresh = step()
        for one, other in zip(captured, fresh, strict=True):
            assert torch.equal(one, other)
