"""Speculation changes how fast tokens come, never which distribution they come from."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from topkapi.errors import ShapeError
from topkapi.reference import accept_greedy, accept_sampled

# 99.9 % points of chi-squared, by degrees of freedom.
CHI2 = {15: 37.7, 26: 54.1, 63: 103.4}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distributions(shape: tuple[int, ...], seed: int, sharpness: float = 1.5) -> torch.Tensor:
    return (sharpness * torch.randn(*shape, generator=generator(seed))).softmax(-1)


@dataclass(frozen=True)
class Round:
    """A target model and a draft model that both look at all tokens before, as tables of
    probabilities by prefix. `certain` drafts take the draft model's best token.
    """

    vocab: int
    drafts: int
    seed: int
    sharpness: float = 1.5
    certain: bool = False
    missing: int = 0

    def tables(self, seed: int) -> list[torch.Tensor]:
        """One table `[vocab ** j, vocab]` for every length j of the prefix."""
        return [
            distributions((self.vocab**j, self.vocab), seed + j, self.sharpness)
            for j in range(self.drafts + 1)
        ]


ROUNDS = [
    Round(vocab=4, drafts=1, seed=0),
    Round(vocab=3, drafts=2, seed=10),
    Round(vocab=4, drafts=2, seed=20, sharpness=3.0),
    Round(vocab=3, drafts=2, seed=30, certain=True),
    Round(vocab=4, drafts=2, seed=40, missing=1),
    Round(vocab=4, drafts=2, seed=50, sharpness=0.0),  # equal models: nothing is refused
]
TRIALS = 40_000


@pytest.mark.parametrize("case", ROUNDS, ids=str)
def test_the_output_distribution_is_the_targets(case: Round) -> None:
    """The first `drafts + 1` tokens of rounds, the rest drawn from the target, by chi-squared."""
    length = case.drafts + 1
    target, draft = case.tables(case.seed), case.tables(case.seed + 100)
    rng = generator(case.seed)
    tokens, probs, prefix = [], [], torch.zeros(TRIALS, dtype=torch.long)
    target_rows = [target[0][prefix]]
    for j in range(case.drafts):
        q = draft[j][prefix]
        token = q.argmax(1) if case.certain else torch.multinomial(q, 1, generator=rng)[:, 0]
        tokens.append(token)
        probs.append(q)
        prefix = prefix * case.vocab + token
        target_rows.append(target[j + 1][prefix])
    got = accept_sampled(
        torch.stack(tokens, 1),
        torch.stack(target_rows, 1),
        torch.rand(TRIALS, case.drafts, generator=rng),
        torch.rand(TRIALS, length, generator=rng),
        draft_probs=None if case.certain else torch.stack(probs, 1),
        num_drafts=torch.full((TRIALS,), case.drafts - case.missing) if case.missing else None,
    )
    assert int(got.num_accepted.max()) == case.drafts - case.missing
    assert (case.sharpness == 0) == bool((got.num_accepted == case.drafts).all())
    whole = torch.zeros(TRIALS, dtype=torch.long)
    for j in range(length):
        token = got.tokens[:, j]
        drawn = torch.multinomial(target[j][whole], 1, generator=rng)[:, 0]
        whole = whole * case.vocab + torch.where(token < 0, drawn, token)
    counts = torch.bincount(whole, minlength=case.vocab**length).double()
    expected = target[0][0]
    for table in target[1:]:
        expected = (expected[:, None] * table).flatten()
    expected = expected.double() * TRIALS
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < CHI2[case.vocab**length - 1]


def test_a_wrong_rule_is_caught() -> None:
    """The chi-squared above can fail: choosing from p, not from what p has more, is skewed."""
    p, q = distributions((4,), 0), distributions((4,), 100)
    draft = torch.multinomial(q, TRIALS, replacement=True, generator=generator(1))
    accepted = torch.rand(TRIALS, generator=generator(2)) * q[draft] < p[draft]
    again = torch.multinomial(p, TRIALS, replacement=True, generator=generator(3))
    counts = torch.bincount(torch.where(accepted, draft, again), minlength=4)
    assert ((counts - p * TRIALS) ** 2 / (p * TRIALS)).sum() > CHI2[15]


def test_greedy_accepts_the_common_beginning() -> None:
    draft = torch.tensor([[3, 4, 5], [3, 9, 5], [9, 4, 5], [3, 4, 5], [3, 4, -1]])
    target = torch.tensor([[3, 4, 5, 6]]).expand(5, -1)
    num_drafts = torch.tensor([3, 3, 3, 1, 2])
    got = accept_greedy(draft, target, num_drafts=num_drafts)
    assert got.num_accepted.tolist() == [3, 1, 0, 1, 2]
    assert got.tokens.tolist() == [
        [3, 4, 5, 6],
        [3, 4, -1, -1],
        [3, -1, -1, -1],
        [3, 4, -1, -1],
        [3, 4, 5, -1],
    ]


@pytest.mark.parametrize("with_probs", [False, True])
def test_sampled_is_greedy_where_the_target_is_certain(with_probs: bool) -> None:
    batch, drafts, vocab = 65, 3, 7
    rng = generator(5)
    target = torch.randint(0, vocab, (batch, drafts + 1), generator=rng)
    q = distributions((batch, drafts, vocab), 6)
    draft = torch.where(
        torch.rand(batch, drafts, generator=rng) < 0.7,
        target[:, :-1],
        torch.randint(0, vocab, (batch, drafts), generator=rng),
    )
    num_drafts = torch.randint(0, drafts + 1, (batch,), generator=rng)
    got = accept_sampled(
        draft,
        torch.nn.functional.one_hot(target, vocab).float(),
        torch.rand(batch, drafts, generator=rng),
        torch.rand(batch, drafts + 1, generator=rng),
        draft_probs=q if with_probs else None,
        num_drafts=num_drafts,
    )
    expected = accept_greedy(draft, target, num_drafts=num_drafts)
    assert got.num_accepted.tolist() == expected.num_accepted.tolist()
    assert got.tokens.tolist() == expected.tokens.tolist()


def test_no_token_of_probability_zero_comes_out() -> None:
    batch, drafts, vocab = 500, 2, 9
    p = distributions((batch, drafts + 1, vocab), 1)
    banned = torch.rand(p.shape, generator=generator(2)) < 0.6
    banned[..., 4] = False
    p = p.masked_fill(banned, 0)
    p = p / p.sum(-1, keepdim=True)
    q = distributions((batch, drafts, vocab), 3)
    draft = torch.multinomial(q.flatten(0, 1), 1, generator=generator(4)).view(batch, drafts)
    for accept, choose in itertools.product((0.0, 0.5, 1 - 2**-53), repeat=2):
        uniforms = torch.full((batch, drafts + 1), choose, dtype=torch.float64)
        got = accept_sampled(draft, p, torch.full((batch, drafts), accept), uniforms, draft_probs=q)
        kept = got.tokens >= 0
        chosen = p.gather(2, got.tokens.clamp_min(0)[..., None]).squeeze(2)
        assert (chosen[kept] > 0).all()
        assert torch.equal(kept.sum(1), got.num_accepted + 1)


def test_a_row_does_not_depend_on_its_batch() -> None:
    batch, drafts, vocab = 33, 3, 11
    p, q = distributions((batch, drafts + 1, vocab), 1), distributions((batch, drafts, vocab), 1)
    draft = torch.multinomial(q.flatten(0, 1), 1, generator=generator(4)).view(batch, drafts)
    accept = torch.rand(batch, drafts, generator=generator(5))
    choose = torch.rand(batch, drafts + 1, generator=generator(6))
    whole = accept_sampled(draft, p, accept, choose, draft_probs=q)
    for i in (0, 7, batch - 1):
        row = slice(i, i + 1)
        alone = accept_sampled(draft[row], p[row], accept[row], choose[row], draft_probs=q[row])
        assert torch.equal(alone.tokens[0], whole.tokens[i])
    p[3] = float("nan")
    p[5] = 0.0
    spoilt = accept_sampled(draft, p, accept, choose, draft_probs=q)
    others = [i for i in range(batch) if i not in (3, 5)]
    assert torch.equal(spoilt.tokens[others], whole.tokens[others])
    assert spoilt.tokens[[3, 5], 0].tolist() == [-1, -1]


@pytest.mark.parametrize(("batch", "drafts"), [(0, 2), (3, 0), (1, 1)])
def test_empty_and_small(batch: int, drafts: int) -> None:
    p = distributions((batch, drafts + 1, 5), 1)
    draft = torch.zeros(batch, drafts, dtype=torch.long)
    got = accept_sampled(draft, p, torch.rand(batch, drafts), torch.rand(batch, drafts + 1))
    assert got.tokens.shape == (batch, drafts + 1)
    assert (got.num_accepted <= drafts).all()
    assert accept_greedy(draft, p.argmax(-1)).tokens.shape == (batch, drafts + 1)


def test_shapes_are_checked() -> None:
    draft = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ShapeError, match="target_tokens"):
        accept_greedy(draft, draft)
    with pytest.raises(ShapeError, match="choose_uniforms"):
        accept_sampled(draft, torch.rand(2, 4, 5), torch.rand(2, 3), torch.rand(2, 3))
