"""Bit for bit: log-probabilities of a request, whatever runs beside it and whatever was cached."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from peers.tiny_models import BY_NAME
from topkapi.config import BackendOptions
from topkapi.engine.llm import LLM
from topkapi.engine.request import RequestOutput, SamplingParams
from topkapi.models import row_invariant
from topkapi.models.row_invariant import RowInvariant, per_head, row_invariant_linear

PARAMS = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, logprobs=5)


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 90) for _ in range(29)]
    own = [[rng.randrange(3, 90) for _ in range(n)] for n in (1, 7, 8, 40)]
    return [[*shared, *item] for item in own]


def make(name: str, **options: Any) -> LLM:
    deterministic = BackendOptions(deterministic=True)
    return LLM(
        BY_NAME[name].build(),
        **{"page_size": 8, "max_batch_tokens": 64, "backend_options": deterministic, **options},
    )


def bits(output: RequestOutput) -> list[tuple[int, float, dict[int, float]]]:
    assert output.error is None
    assert output.logprobs is not None
    return [(item.token_id, item.logprob, item.top) for item in output.logprobs]


def twice(llm: LLM) -> list[Any]:
    """Every prompt, and then the next turn of two of them."""
    first = llm.generate(prompts(), PARAMS, use_tqdm=False)
    turn = [[*output.prompt_token_ids, *output.token_ids, 5] for output in first[:2]]
    return [bits(output) for output in (*first, *llm.generate(turn, PARAMS, use_tqdm=False))]


WAYS: dict[str, dict[str, Any]] = {
    "cached": {},
    "small chunks": {"max_batch_tokens": 13, "max_running_requests": 3},
    "preempted": {"max_tokens_in_cache": 104, "max_batch_tokens": 200},
    "from the host": {"max_tokens_in_cache": 96, "host_cache_tokens": 1000},
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products of a few rows take longer to hand out than to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["deepseek_v32_yarn", "glm_shared"])
def test_bits_do_not_depend_on_the_cache_or_the_batch(name: str) -> None:
    alone = make(name, enable_prefix_cache=False, max_running_requests=1)
    want = twice(alone)
    assert alone.stats().cache.found_tokens == 0
    for way, options in WAYS.items():
        llm = make(name, **options)
        assert twice(llm) == want, way
        stats = llm.stats()
        assert stats.cache.found_tokens >= 24
        assert stats.preemptions > 0 or way != "preempted"
        assert stats.cache.restored_pages > 0 or way != "from the host"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_right_and_rows_their_own(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(37, 3, 300).to(dtype), torch.randn(3, 300, 40).to(dtype)
    bias = torch.randn(40).to(dtype)
    heads = per_head(x, weight, row_invariant=True)
    torch.testing.assert_close(heads, per_head(x, weight, row_invariant=False))
    rows, linear = x[:, 0], weight[0].T.contiguous()
    flat = row_invariant_linear(rows, linear, bias)
    torch.testing.assert_close(flat, torch.nn.functional.linear(rows, linear, bias))
    for first, last in [(0, 1), (5, 6), (3, 19), (20, 37)]:
        part = row_invariant_linear(rows[None, first:last], linear, bias)[0]
        assert torch.equal(part, flat[first:last])
        part = per_head(x[first:last], weight, row_invariant=True)
        assert torch.equal(part, heads[first:last])


SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x.mean(-1, keepdim=True),
    "mean of a function": lambda x: torch.mean(x, dim=(x.ndim - 1,)),
    "sum": lambda x: x.sum(dim=-1),
    "sum in fp32": lambda x: torch.sum(x, -1, True, dtype=torch.float32),
    "mean, as NumPy has it": lambda x: torch.mean(input=x, axis=-1, keepdims=True),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_rows_are_right_and_their_own(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's sums are their own anyway, so it is seen that they go by tiles."""
    torch.manual_seed(0)
    x, over = torch.randn(2, 37, 300).to(dtype), SUMS[name]
    seen, tiles = [], row_invariant._tiles

    def tiled(*args: Any) -> Any:
        seen.append(args)
        return tiles(*args)

    monkeypatch.setattr(row_invariant, "_tiles", tiled)
    with RowInvariant():
        whole = over(x)
        assert len(seen) == 1
        parts = [over(x[:, first:last]) for first, last in ((0, 1), (1, 20), (20, 37))]
    assert whole.shape == over(x).shape
    assert whole.dtype == over(x).dtype
    torch.testing.assert_close(whole, over(x))
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_activations_take_any_shape_and_named_inputs() -> None:
    shapes = [(), (1,), (3, 0), (0, 3), (2, 3, 5)]
    for x in (torch.randn(shape) for shape in shapes):
        with RowInvariant():
            got = torch.sigmoid(input=x), torch.nn.functional.silu(x)
        torch.testing.assert_close(got, (torch.sigmoid(x), torch.nn.functional.silu(x)))


def test_other_sums_are_left_alone() -> None:
    x = torch.randn(3, 40, 5)
    with RowInvariant():
        assert torch.equal(x.sum(), x.sum())
        assert x.sum(1).shape == (3, 5)
        assert x.mean((0, 2)).shape == (40,)
        assert (x > 0).sum(-1).dtype == torch.int64
        assert x[:0].mean(-1).shape == (0, 40)
        assert x[0, 0].mean(-1).shape == ()
    torch.testing.assert_close(x.sum(1), x.transpose(1, 2).sum(-1))
