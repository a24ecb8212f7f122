"""Wrong arguments: each is refused with a message that says what was expected and what came."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cases import SELECT_CASES, SPARSE_MLA_CASES
from topkapi import ops
from topkapi.context import Context
from topkapi.dispatch import Kernel, Op
from topkapi.errors import KernelRefusedError, ShapeError


def select_inputs() -> dict[str, Any]:
    return next(case for case in SELECT_CASES if case.name == "mixed").make()


def mla_inputs() -> dict[str, Any]:
    return next(case for case in SPARSE_MLA_CASES if case.name == "plain").make()


SELECT_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(85, 128)}, r"q: expected \[R, Hi, Di\], got shape \[85, 128\]"),
    ({"q": torch.zeros(85, 16, 128, dtype=torch.int32)}, "q: expected dtype float32"),
    ({"weights": torch.zeros(85, 8)}, r"weights: expected \[R, Hi\] with R=85, Hi=16, got shape"),
    ({"weights": torch.zeros(85, 16).bfloat16()}, "weights: expected dtype float32, got"),
    ({"index_cache": torch.zeros(640, 64)}, r"index_cache: expected \[slots, Di\] with Di=128"),
    ({"index_cache": torch.zeros(4, 100).byte()}, r"index_cache: .*multiple of Di \+ 4 = 132"),
    ({"index_cache": torch.zeros(640, 128).int()}, "index_cache: expected dtype"),
    ({"k": 0}, "k: expected at least 1, got 0"),
    ({"output": "pages"}, "output: expected slots or positions, got 'pages'"),
]


@pytest.mark.parametrize(("change", "message"), SELECT_MISTAKES, ids=lambda x: str(x)[:40])
def test_select_names_the_mistake(change: dict[str, Any], message: str) -> None:
    inputs = select_inputs()
    rows = inputs["q"].shape[0]
    for name, value in change.items():
        if isinstance(value, torch.Tensor) and value.shape[0] == 85:
            value = value[:1].expand(rows, *value.shape[1:])
        inputs[name] = value
    with pytest.raises(ShapeError, match=message.replace("85", str(rows))):
        ops.select(**inputs)


CONTEXT_MISTAKES: list[tuple[str, Any, str]] = [
    ("lengths", torch.zeros(3, dtype=torch.int32), r"context.lengths: expected \[R\] with R="),
    ("lengths", torch.zeros(85), "context.lengths: expected dtype int32, int64"),
    ("request_of_row", torch.zeros(3, dtype=torch.int32), "context.request_of_row: expected"),
    ("table_rows", None, r"context.table_rows: expected \[B\] beside a table, got None"),
    ("table_rows", torch.zeros(9, dtype=torch.int64), r"context.table_rows: .*B=4"),
    ("table", None, "context: expected a table or starts, got neither"),
    ("max_length", 10**6, "context.max_length: expected at most the table's 518 columns"),
]


@pytest.mark.parametrize(("name", "value", "message"), CONTEXT_MISTAKES)
@pytest.mark.parametrize("op", ["select", "indexer_logits"])
def test_a_wrong_context_is_named(op: str, name: str, value: Any, message: str) -> None:
    inputs = select_inputs()
    if isinstance(value, torch.Tensor) and value.shape[0] == 85:
        value = value[:1].expand(inputs["q"].shape[0])
    inputs["context"] = replace(inputs["context"], **{name: value})
    if op == "indexer_logits":
        del inputs["k"]
    with pytest.raises(ShapeError, match=message):
        getattr(ops, op)(**inputs)


MLA_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(5, 576)}, r"q: expected \[R, H, D\]"),
    ({"q": torch.zeros(5, 8, 600)}, r"kv_cache: expected W=600 for fp32 records of latent 512"),
    ({"slots": torch.zeros(4, 64).int()}, r"slots: expected \[R, K\] with R=5"),
    ({"slots": torch.zeros(5, 64)}, "slots: expected dtype int32, int64"),
    ({"v_dim": 577}, "v_dim: expected 1 to D=576, got 577"),
    ({"v_dim": 0}, "v_dim: expected 1 to D=576, got 0"),
    ({"scale": 0.0}, "scale: expected more than 0, got 0.0"),
    ({"scale": float("nan")}, "scale: expected more than 0, got nan"),
    ({"kv_cache": torch.zeros(320, 576)}, r"kv_cache: expected \[slots, 1, W\]"),
    ({"kv_cache": torch.zeros(320, 1, 576).byte()}, "W=656 for fp8 records"),
    ({"kv_cache": torch.zeros(320, 1, 576).double()}, "kv_cache: expected dtype"),
    ({"sinks": torch.zeros(7)}, r"sinks: expected \[H\] with H=8"),
]


@pytest.mark.parametrize(("change", "message"), MLA_MISTAKES, ids=lambda x: str(x)[:40])
def test_sparse_mla_names_the_mistake(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        ops.sparse_mla(**{**mla_inputs(), **change})


def test_topk_names_the_mistake() -> None:
    logits, lengths = torch.zeros(2, 5), torch.tensor([5, 1], dtype=torch.int32)
    with pytest.raises(ShapeError, match="k: expected at least 1, got -3"):
        ops.topk(logits, lengths, -3)
    with pytest.raises(ShapeError, match=r"lengths: expected \[R\] with R=2"):
        ops.topk(logits, lengths[:1], 1)
    with pytest.raises(ShapeError, match=r"logits: expected dtype float32, got torch\.bfloat16"):
        ops.topk(logits.bfloat16(), lengths, 1)
    with pytest.raises(ShapeError, match=r"starts: expected \[R\] with R=2"):
        ops.topk(logits, lengths, 1, starts=lengths[:1])


def test_records_name_the_mistake() -> None:
    slots = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ShapeError, match="W=6 for fp32 records of latent 4 and rope 2"):
        ops.write_latent(torch.zeros(8, 1, 7), slots, torch.zeros(3, 4), torch.zeros(3, 2))
    with pytest.raises(ShapeError, match=r"rope: expected \[T, P\] with T=3"):
        ops.write_latent(torch.zeros(8, 1, 6), slots, torch.zeros(3, 4), torch.zeros(2, 2))
    with pytest.raises(ShapeError, match=r"index_cache: expected \[slots, Di\] with Di=4"):
        ops.write_index_key(torch.zeros(8, 5), slots, torch.zeros(3, 4))
    with pytest.raises(ShapeError, match=r"multiple of Di \+ 4 = 36 bytes, got shape \[8, 35\]"):
        ops.write_index_key(torch.zeros(8, 35).byte(), slots, torch.zeros(3, 32))
    with pytest.raises(ShapeError, match="v_dim: expected 1 to what a record of W=6 holds, got 7"):
        ops.gather_latent(torch.zeros(8, 1, 6), slots, v_dim=7)
    with pytest.raises(ShapeError, match="W=654 for fp8 records of latent 512 and rope 63"):
        ops.gather_latent(torch.zeros(8, 1, 655).byte(), slots, v_dim=512)


def test_caches_with_gaps_are_refused() -> None:
    """Kernels on GPUs would write between, or copy it all; records and fp8 pages may lie apart."""
    slots = torch.zeros(3, dtype=torch.int64)
    latent, rope = torch.ones(3, 4), torch.ones(3, 2)
    gaps = torch.zeros(8, 1, 12)[..., ::2]
    with pytest.raises(ShapeError, match=r"kv_cache: expected records without gaps, .* 2\]"):
        ops.write_latent(gaps, slots, latent, rope)
    with pytest.raises(ShapeError, match="kv_cache: expected records without gaps"):
        ops.gather_latent(gaps, slots, v_dim=4)
    with pytest.raises(ShapeError, match="kv_cache: expected records without gaps"):
        ops.sparse_mla(torch.ones(3, 2, 6), gaps, slots[:, None].int(), scale=0.1, v_dim=4)
    apart = torch.zeros(8, 1, 12)[..., :6]
    ops.write_latent(apart, slots, latent, rope)
    assert ops.gather_latent(apart, slots, v_dim=4, dtype=torch.float32).sum() == 18
    with pytest.raises(ShapeError, match=r"index_cache: expected keys without gaps, .*\[8, 1\]"):
        ops.write_index_key(torch.zeros(8, 8)[:, :4], slots, latent)
    with pytest.raises(ShapeError, match="index_cache: expected pages without gaps"):
        ops.write_index_key(torch.zeros(4, 32).byte()[:, ::2], slots, latent)
    ops.write_index_key(torch.zeros(4, 32).byte()[:, :16], slots, latent)


def test_kernels_get_vectors_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on GPUs address them by their place alone."""
    seen: list[torch.Tensor] = []

    def launch(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Context):
                seen.extend(v for v in vars(value).values() if isinstance(v, torch.Tensor))
            elif isinstance(value, torch.Tensor) and value.ndim == 1:
                seen.append(value)
        return torch.zeros(1)

    def gaps(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(2, dim=-1)[..., ::2]

    stub = Kernel("stub", "any", lambda problem: None, launch)
    monkeypatch.setattr(Op, "choose", lambda *_: stub)
    inputs = select_inputs()
    tensors = {n: v for n, v in vars(inputs["context"]).items() if isinstance(v, torch.Tensor)}
    inputs["context"] = replace(inputs["context"], **{n: gaps(v) for n, v in tensors.items()})
    ops.select(**inputs)
    ops.indexer_logits(**{name: value for name, value in inputs.items() if name != "k"})
    ops.sparse_mla(**mla_inputs() | {"sinks": torch.tensor(1.0).expand(8)})
    vector = torch.arange(6, dtype=torch.int32)[::2]
    ops.topk(torch.zeros(3, 9), vector, 2, starts=vector)
    assert len(seen) == 2 * len(tensors) + 3
    assert all(value.is_contiguous() for value in seen)
    for name, value in tensors.items():
        assert torch.equal(getattr(inputs["context"].contiguous(), name), value)


def test_an_unknown_kernel_is_refused_by_name() -> None:
    with pytest.raises(KernelRefusedError, match="sparse_mla: no kernel named 'warp'; known: auto"):
        ops.sparse_mla(**mla_inputs(), kernel="warp")


def test_outputs_carry_no_gradient() -> None:
    """A model called outside `no_grad` must run, and says that it is inference."""
    inputs = mla_inputs()
    inputs["q"].requires_grad_()
    out, lse = ops.sparse_mla(**inputs)
    assert not out.requires_grad
    assert not lse.requires_grad
    inputs = select_inputs()
    inputs["q"].requires_grad_()
    inputs["weights"].requires_grad_()
    assert ops.select(**inputs).shape == (inputs["q"].shape[0], inputs["k"])
    keys = torch.ones(1, 128, requires_grad=True)
    ops.write_index_key(inputs["index_cache"], torch.tensor([0]), keys)
    assert not inputs["index_cache"].requires_grad
