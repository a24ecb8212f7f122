"""Is a kernel's answer right? A few rows of it against the float64 reference.

Selections of float scores are compared by value (a tie that rounding broke is no fault), those of
given logits exactly, records byte by byte, outputs by relative error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from topkapi import reference
from topkapi.bench.cases import BenchCase
from topkapi.bench.inputs import Arguments
from topkapi.context import Context

Tensors = tuple[torch.Tensor, ...]

# Bounds of norm(got - want) / norm(want). Scores of e4m3 queries are summed by tensor cores that
# keep about 13 bits; outputs in bf16 carry the rounding of probabilities and of the last store.
_SCORES = {"fp8": 5e-3, "bf16": 1e-4, "fp16": 1e-4, "fp32": 1e-4}
_OUTPUTS = {"bf16": 1e-2, "fp16": 3e-3, "fp32": 1e-4}
# lse: largest difference, absolute; peers give it in bf16's precision of the scores.
_LSE = {"bf16": 2e-2, "fp16": 1e-2, "fp32": 1e-4}
# Share of a record's bytes that may differ by the rounding of a scale.
_BYTES = 1e-3
# Values the reference may hold of one case.
_BUDGET = 2**24
WRITTEN = {"write_latent": "kv_cache", "write_index_key": "index_cache"}


@dataclass(frozen=True)
class Verdict:
    """`wrong` says what differs, None if nothing; `error` is the relative error seen."""

    wrong: str | None = None
    error: float = 0.0


@dataclass(frozen=True)
class Expected:
    """What the reference says of some rows of one case. `judge(tensors, exact)` compares a whole
    answer with it; without `exact` the order of a selection and the choice among ties are free.
    """

    rows: torch.Tensor
    judge: Callable[[Tensors, bool], Verdict]


def expect(case: BenchCase, arguments: Arguments) -> Expected:
    """Compute the reference for a sample of rows. Synchronises."""
    makers = {
        "sparse_mla": _expect_attention,
        "indexer_logits": _expect_logits,
        "select": _expect_selection,
        "topk": _expect_topk,
        "gather_latent": _expect_gathered,
    }
    device = next(v.device for v in arguments.values() if isinstance(v, torch.Tensor))
    rows = _sample(case, device)
    judge = makers.get(case.op, _expect_written)(case, arguments, rows)
    return Expected(rows, judge)


def _sample(case: BenchCase, device: torch.device) -> torch.Tensor:
    """First and last row and some between; all of them where the reference is cheap."""
    cost = {
        "sparse_mla": case.k * (case.latent + case.rope + case.heads),
        "indexer_logits": case.context * case.index_heads,
        "select": case.context * case.index_heads,
        "topk": case.context,
    }.get(case.op, 1)
    count = min(case.rows, max(4, _BUDGET // cost))
    # Distinct: count is at most the number of rows.
    return torch.linspace(0, case.rows - 1, count, dtype=torch.float64).round().long().to(device)


def _relative(got: torch.Tensor, want: torch.Tensor, what: str, bound: float) -> Verdict:
    """Patterns of what is not finite first, then norms."""
    if got.shape != want.shape:
        return Verdict(f"{what}: shape {list(got.shape)}, not {list(want.shape)}")
    got, want = got.double(), want.double()
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return Verdict(f"{what}: finite where the reference is not, or the reverse")
    difference, size = (got - want)[finite].norm(), want[finite].norm()
    error = float(difference / size.clamp_min(1e-30))
    return Verdict(None if error <= bound else f"{what}: relative error {error:.1e}", error)


def _expect_attention(case: BenchCase, arguments: Arguments, rows: torch.Tensor) -> Any:
    options = {k: v for k, v in arguments.items() if k not in ("q", "slots", "phase")}
    want, want_lse = reference.sparse_mla(
        arguments["q"][rows].double(), slots=arguments["slots"][rows], **options
    )

    def judge(got: Tensors, exact: bool) -> Verdict:
        out = _relative(got[0][rows], want, "output", _OUTPUTS[case.arithmetic])
        if out.wrong:
            return out
        lse = float((got[1][rows].double() - want_lse).nan_to_num(posinf=0, neginf=0).abs().max())
        same = torch.equal(got[1][rows].isfinite(), want_lse.isfinite())
        if not same or lse > _LSE[case.arithmetic]:
            return Verdict(f"lse: off by {lse:.1e}", out.error)
        return out

    return judge


def rows_of(context: Context, rows: torch.Tensor) -> Context:
    """The context of some rows, each a request of its own."""
    assert context.table_rows is not None, "measured contexts have a table"
    requests = context.request_of_row[rows].long()
    count = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
    return replace(
        context,
        lengths=context.lengths[rows],
        request_of_row=count[:-1],
        cu_seqlens_q=count,
        max_seq_len_q=1,
        table_rows=context.table_rows[requests],
    )


def _wanted_logits(arguments: Arguments, rows: torch.Tensor) -> torch.Tensor:
    return reference.indexer_logits(
        arguments["q"][rows].double(),
        arguments["weights"][rows].double(),
        arguments["index_cache"],
        rows_of(arguments["context"], rows),
    )


def _expect_logits(case: BenchCase, arguments: Arguments, rows: torch.Tensor) -> Any:
    want = _wanted_logits(arguments, rows)
    return lambda got, exact: _relative(got[0][rows], want, "logits", _SCORES[case.arithmetic])


def _expect_selection(case: BenchCase, arguments: Arguments, rows: torch.Tensor) -> Any:
    logits = _wanted_logits(arguments, rows)
    bound = _SCORES[case.arithmetic]
    part = rows_of(arguments["context"], rows)
    slots = part.slots(torch.arange(part.max_length, device=rows.device).expand_as(logits))

    def judge(got: Tensors, exact: bool) -> Verdict:
        chosen = got[0][rows].long()
        if exact:
            # Where in the context each slot lies: slots of one row are distinct.
            order = slots.long().sort(1)
            at = torch.searchsorted(order.values, chosen.clamp_min(0)).clamp_max(slots.shape[1] - 1)
            if not torch.equal(order.values.gather(1, at), chosen.clamp_min(0)):
                return Verdict("a slot outside the row's context, or a -1")
            chosen = order.indices.gather(1, at)
            if (chosen[:, 1:] <= chosen[:, :-1]).any():
                return Verdict("not ascending by position")
        return _best(chosen, logits, part.lengths, bound)

    return judge


def _best(
    chosen: torch.Tensor, logits: torch.Tensor, lengths: torch.Tensor, bound: float
) -> Verdict:
    """Whether `chosen [R, k]` are distinct positions whose logits are the k best, within `bound` of
    the largest logit of the row. For rows of at least k tokens.
    """
    ordered = chosen.sort(1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any() or (ordered >= lengths[:, None]).any():
        return Verdict("a position twice, or outside the row's context")
    values = logits.gather(1, ordered).sort(1, descending=True).values
    best = logits.topk(chosen.shape[1], dim=1).values
    largest = logits.masked_fill(logits == float("-inf"), 0.0).abs().amax(1, keepdim=True)
    error = float(((best - values) / largest.clamp_min(1e-30)).amax())
    return Verdict(None if error <= bound else f"not the best: short by {error:.1e}", error)


def _expect_topk(case: BenchCase, arguments: Arguments, rows: torch.Tensor) -> Any:
    logits, lengths = arguments["logits"][rows], arguments["lengths"][rows]
    want = reference.topk(logits, lengths, case.k)

    def judge(got: Tensors, exact: bool) -> Verdict:
        chosen = got[0][rows]
        if not exact:
            return _best(chosen.long(), logits, lengths, 0.0)
        wrong = (chosen != want).any(1)
        count = int(wrong.sum())
        return Verdict(f"{count} of {len(rows)} rows differ" if count else None)

    return judge


def _expect_gathered(case: BenchCase, arguments: Arguments, rows: torch.Tensor) -> Any:
    want = reference.gather_latent(
        arguments["kv_cache"],
        arguments["slots"][rows],
        v_dim=arguments["v_dim"],
        dtype=torch.float64,
    )
    return lambda got, exact: _relative(got[0][rows], want, "output", _OUTPUTS[case.arithmetic])


def _expect_written(case: BenchCase, arguments: Arguments, rows: torch.Tensor) -> Any:
    # On the host, where dividing by a constant is a division: a GPU's torch multiplies instead.
    host = {name: value.to("cpu", copy=True) for name, value in arguments.items()}
    cache = host[WRITTEN[case.op]]
    before = cache.clone().view(torch.uint8)
    getattr(reference, case.op)(**host)
    want = cache.view(torch.uint8)
    changed = max(1, int((want != before).sum()))

    def judge(got: Tensors, exact: bool) -> Verdict:
        different = int((got[0].cpu().view(torch.uint8) != want).sum())
        share = different / changed
        return Verdict(f"{share:.2%} of the bytes differ" if share > _BYTES else None, share)

    return judge
