"""Whatever the engine did, the MTP layer's cache holds what it would after one long prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.conftest import make_llm
from engine.drafting import (
    GREEDY,
    PROMPTS,
    Oracle,
    prompts_of,
    run,
    runner_of,
    save_checkpoint,
    tokens,
)
from topkapi.engine.request import RequestOutput, SamplingParams


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which most drafts are right."""
    return save_checkpoint(tmp_path_factory.mktemp("guessing"), guesses=True)


@pytest.fixture(scope="module")
def oracle(guessing: Path) -> Oracle:
    return Oracle(guessing)


class Watched:
    """An engine that drafts, and a record of the logits of every round's first draft."""

    def __init__(self, path: Path, oracle: Oracle, **options: Any) -> None:
        self.llm = make_llm(path, **{"speculative_num_steps": 2, **options})
        self._oracle = oracle
        self._drafts: list[tuple[int, int, torch.Tensor]] = []
        drafter = runner_of(self.llm)._drafter
        propose = drafter.propose

        def watched(chunks: Any, num_drafts: int, choose: Any) -> torch.Tensor:
            def seen(logits: torch.Tensor, place: int) -> torch.Tensor:
                if place == 0:
                    for chunk, row in zip(chunks, logits, strict=True):
                        self._drafts.append((chunk.request.request_id, chunk.start, row))
                return choose(logits, place)

            return propose(chunks, num_drafts, seen)

        drafter.propose = watched  # type: ignore[method-assign]

    def run(self, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
        outputs = run(self.llm, prompts, params)
        for output in outputs:
            self.check(output)
        return outputs

    def check(self, output: RequestOutput, least: int = 5) -> None:
        """Every first draft is what the layer says when it is run over the whole text at once."""
        text = [*output.prompt_token_ids, *output.token_ids]
        want = self._oracle.draft_logits(text)
        mine = [(start, row) for owner, start, row in self._drafts if owner == output.request_id]
        assert len(mine) >= least
        got = torch.stack([row for _, row in mine])
        torch.testing.assert_close(got, want[[start - 1 for start, _ in mine]], atol=1e-3, rtol=0)


class TestTheLayerSeesEverything:
    @pytest.mark.parametrize("max_batch_tokens", [64, 27])
    def test_after_prompts_in_chunks(
        self, guessing: Path, oracle: Oracle, max_batch_tokens: int
    ) -> None:
        Watched(guessing, oracle, max_batch_tokens=max_batch_tokens).run(PROMPTS)

    def test_behind_a_shared_prefix(self, guessing: Path, oracle: Oracle) -> None:
        """The record beside a page's last token must not depend on who asked first."""
        watched = Watched(guessing, oracle)
        prompts = [PROMPTS[9][:64] + tail for tail in prompts_of([1, 3, 9, 30], seed=1)]
        watched.run(prompts[:1])
        # All at once: each reads the page while the others do.
        for output in watched.run(prompts):
            assert output.num_cached_tokens == 64

    def test_behind_an_answer_that_was_drafted(self, guessing: Path, oracle: Oracle) -> None:
        """Wherever the answer ended: its last tokens may lie in a page that is not yet sound."""
        watched = Watched(guessing, oracle)
        for length, prompt in enumerate(prompts_of([40] * 9, seed=5), start=13):
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            [first] = run(watched.llm, [prompt], params)
            text = [*prompt, *first.token_ids]
            [second] = watched.run([[*text, 5, 6]])
            assert second.num_cached_tokens >= (len(text) - 4) // 8 * 8

    def test_behind_pages_that_were_on_the_host(self, guessing: Path, oracle: Oracle) -> None:
        watched = Watched(guessing, oracle, max_tokens_in_cache=160, host_cache_tokens=320)
        watched.run([PROMPTS[10]])
        watched.run(prompts_of([120], seed=3))  # takes nearly all of the cache
        [again] = watched.run([PROMPTS[10]])
        assert again.num_cached_tokens == 96

    def test_after_preemption(self, guessing: Path, oracle: Oracle) -> None:
        watched = Watched(guessing, oracle, max_tokens_in_cache=160)
        prompts = prompts_of([50, 55, 60, 20], seed=2)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        outputs = watched.run(prompts, params)
        assert watched.llm.engine.scheduler.num_preemptions > 0
        assert tokens(outputs) == tokens(run(make_llm(guessing), prompts, params))

    def test_when_drafting_begins_late(self, guessing: Path, oracle: Oracle) -> None:
        """Hidden states wait while nobody drafts, and some rows are computed in between."""
        watched = Watched(guessing, oracle)
        length = runner_of(watched.llm).length
        length.most = 0
        stream = watched.llm.stream(PROMPTS[7], SamplingParams(temperature=0, max_tokens=60))
        for _ in range(21):
            next(stream)
        length.most = 2
        *_, last = stream
        assert last.output is not None
        watched.check(last.output)
