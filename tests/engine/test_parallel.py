"""A model split over ranks answers as one process does, and no rank's end is a hang."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import HashStore

from engine.forked_ranks import Forked, fork, start_forked
from peers.tiny_models import BY_NAME, TOPK
from topkapi.config import BackendOptions
from topkapi.engine import parallel, runner
from topkapi.engine.llm import LLM
from topkapi.engine.parallel import RemoteEngine
from topkapi.engine.parallel_runner import CheckedBackend, checksum
from topkapi.engine.ranks import Failure, FailureReport, Message
from topkapi.engine.request import RequestOutput, SamplingParams
from topkapi.engine.step_plan import StepPlan
from topkapi.errors import (
    CheckpointError,
    ConfigError,
    ParallelError,
    RequestError,
    SelectionMismatchError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
BLOCK = 16
CONTEXT = 1536
# Longer than a step's budget, longer than k, shorter than both.
LENGTHS = (1, TOPK - 1, TOPK, TOPK + 1, 63, 65, 200)


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def save(name: str, path: Path, *, fp8: bool = False) -> Path:
    """A checkpoint with four heads; its vocabulary of 97 is not even."""
    model = BY_NAME[name].build(
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=CONTEXT
    )
    model.save_pretrained(path)
    if fp8:
        quantize(path)
    return path


def quantize(path: Path) -> None:
    """Make projections block fp8, in blocks that no size is a multiple of."""
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight") and "indexer" not in n]:
        weight = tensors[name]
        rows, columns = weight.shape
        scales = torch.ones(-(-rows // BLOCK), -(-columns // BLOCK))
        stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
                scales[i, j] = weight[at].abs().max() / 448
                stored[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = stored, scales
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (path / "config.json").write_text(json.dumps(config))


def make_llm(path: Path, size: int = 2, **options: Any) -> LLM:
    options = {"page_size": 8, "max_running_requests": 8, "max_batch_tokens": 48, **options}
    return LLM(
        path,
        device="cpu",
        dtype="fp32",
        backend_options=BackendOptions(),
        tensor_parallel_size=size,
        **{"verify_selection": 1, "parallel_timeout": 60.0, **options},
    )


def answers(llm: LLM, params: Any = GREEDY, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    outputs: list[RequestOutput] = llm.generate(prompts_of(lengths), params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks, which see this test's patches."""
    use_forks(monkeypatch)


def use_forks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parallel, "RemoteEngine", lambda spec: RemoteEngine(spec, start_forked))


def pids_of(llm: LLM) -> list[int]:
    assert isinstance(llm.engine, RemoteEngine)
    return llm.engine.pids


def exists(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while any(exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(exists(pid) for pid in pids)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("deepseek_v32", tmp_path_factory.mktemp("deepseek"), fp8=True)


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> LLM:
    return make_llm(checkpoint, 1)


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        use_forks(patch)
        llm = make_llm(checkpoint)
    with llm:
        yield llm
    assert gone(pids_of(llm))


class TestSameAnswers:
    def test_greedy_with_chunked_prompts_and_preemption(self, one: LLM, two: LLM) -> None:
        assert answers(two) == answers(one)
        assert not two.engine.has_work

    def test_a_plan_longer_than_one_message(self, checkpoint: Path, one: LLM, two: LLM) -> None:
        lengths = (1100,)
        assert answers(two, lengths=lengths) == answers(one, lengths=lengths)

    def test_sampling_with_seeds(self, one: LLM, two: LLM) -> None:
        params = [
            SamplingParams(temperature=1.0, top_p=0.9, seed=seed, max_tokens=8, ignore_eos=True)
            for seed in range(len(LENGTHS))
        ]
        assert answers(two, params) == answers(one, params)

    def test_logprobs_of_answers_and_prompts(self, one: LLM, two: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
        [prompt] = prompts_of((150,), seed=4)
        [got], [want] = (llm.generate([prompt], params, use_tqdm=False) for llm in (two, one))
        for found, expected in (
            (got.logprobs, want.logprobs),
            (got.prompt_logprobs[1:], want.prompt_logprobs[1:]),
        ):
            assert [entry.token_id for entry in found] == [entry.token_id for entry in expected]
            torch.testing.assert_close(
                torch.tensor([entry.logprob for entry in found]),
                torch.tensor([entry.logprob for entry in expected]),
                atol=1e-4,
                rtol=0,
            )

    def test_a_stream(self, one: LLM, two: LLM) -> None:
        [prompt] = prompts_of((40,), seed=5)
        streams = [
            [token for update in llm.stream(prompt, GREEDY) for token in update.token_ids]
            for llm in (two, one)
        ]
        assert streams[0] == streams[1]

    def test_a_bad_request_is_its_own_fault(self, two: LLM) -> None:
        good, bad = prompts_of((9,))[0], [500]
        outputs = two.generate([good, bad], GREEDY, use_tqdm=False)
        assert outputs[0].error is None
        assert isinstance(outputs[1].error, RequestError)
        with pytest.raises(RequestError, match="unknown token id 500"):
            two.stream(bad)

    def test_after_an_interrupt_the_next_call_gets_its_own_answer(
        self, one: LLM, two: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits = iter([parallel.wait] * 12)

        def interrupted(*args: Any) -> Any:
            found = next(waits, None)
            if found is None:
                monkeypatch.undo()
                raise KeyboardInterrupt
            return found(*args)

        monkeypatch.setattr(parallel, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answers(two)
        assert not two.engine.has_work
        assert answers(two) == answers(one)

    def test_counters_are_rank_0s(self, two: LLM) -> None:
        assert two.stats().steps > 0
        assert two.model is None
        assert two.max_length == CONTEXT


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", ["glm_shared", "axk2"])
def test_every_family_and_four_ranks(name: str, tmp_path: Path) -> None:
    path = save(name, tmp_path)
    expected = answers(make_llm(path, 1))
    with make_llm(path, 4 if name == "axk2" else 2) as split:
        assert answers(split) == expected


def fault_on(patch: pytest.MonkeyPatch, rank: int, fault: Any, after: int = 3) -> None:
    """From its step `after` on, `rank` does `fault()` before its forward pass."""
    forward, steps = runner.Runner.forward, []

    def faulty(self: Any, plan: StepPlan) -> torch.Tensor:
        steps.append(plan)
        if os.environ.get("RANK") == str(rank) and len(steps) > after:
            fault()
        return forward(self, plan)

    patch.setattr(runner.Runner, "forward", faulty)


def boom() -> None:
    raise RuntimeError("boom")


def hang() -> None:
    time.sleep(600)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("forked")
class TestFaults:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_an_error_in_one_rank(
        self, checkpoint: Path, rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fault_on(monkeypatch, rank, boom)
        with make_llm(checkpoint) as llm:
            pids = pids_of(llm)
            with pytest.raises(ParallelError, match=f"rank {rank} failed: RuntimeError: boom") as e:
                answers(llm)
            assert e.value.rank == rank
            assert 'raise RuntimeError("boom")' in e.value.traceback
            assert gone(pids)
            with pytest.raises(ParallelError, match="boom"):
                answers(llm)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_killed_rank(
        self, checkpoint: Path, rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fault_on(monkeypatch, rank, kill_self)
        with make_llm(checkpoint) as llm:
            pids = pids_of(llm)
            with pytest.raises(ParallelError, match=f"rank {rank} was killed by SIGKILL") as error:
                answers(llm)
            assert error.value.rank == rank
            assert gone(pids)

    def test_a_rank_killed_while_nothing_runs(self, checkpoint: Path) -> None:
        with make_llm(checkpoint) as llm:
            answers(llm, lengths=(9,))
            os.kill(pids_of(llm)[1], signal.SIGKILL)
            with pytest.raises(ParallelError, match="rank 1 was killed by SIGKILL"):
                answers(llm)

    def test_a_rank_whose_death_shows_later_than_what_it_broke(self) -> None:
        """The kernel closes a process's connections before it can be waited for."""

        class Rank:
            def __init__(self, *codes: int | None) -> None:
                self.codes = list(codes)

            def poll(self) -> int | None:
                return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]

        def diagnose(*processes: Rank) -> tuple[Failure | None, tuple[int, str] | None]:
            store = HashStore()
            with suppress(RuntimeError), FailureReport(store, 0):
                raise RuntimeError("connection reset by peer")
            ranks = object.__new__(parallel._Ranks)
            ranks.processes = list(processes)  # type: ignore[arg-type]
            return ranks.diagnose(store)

        failure, killed = diagnose(Rank(None), Rank(None, None, -signal.SIGKILL))
        assert failure is not None
        assert killed == (1, "SIGKILL")
        failure, killed = diagnose(Rank(None, 1), Rank(None))
        assert failure is not None
        assert failure.message == "connection reset by peer"
        assert killed is None

    def test_a_rank_that_hangs(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fault_on(monkeypatch, 1, hang)
        with make_llm(checkpoint, parallel_timeout=3.0) as llm:
            pids, start = pids_of(llm), time.monotonic()
            with pytest.raises(ParallelError, match="rank 0 failed"):
                answers(llm)
            assert time.monotonic() - start < 60
            assert gone(pids)

    def test_ranks_that_select_differently(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        select = CheckedBackend.__mro__[1].forward_indexer

        def other(self: Any, *args: Any) -> torch.Tensor | None:
            selected = select(self, *args)
            if selected is not None and os.environ["RANK"] == "1":
                selected[-1, 0] = selected[-1, 1]
            return selected

        monkeypatch.setattr(CheckedBackend.__mro__[1], "forward_indexer", other)
        with make_llm(checkpoint) as llm:
            with pytest.raises(SelectionMismatchError, match="rank 1 selected other tokens") as e:
                answers(llm)
            assert e.value.rank == 1
        with make_llm(checkpoint, verify_selection=0) as llm:
            answers(llm, lengths=(TOPK + 4,))

    def test_a_broken_checkpoint_is_what_it_is_in_one_process(self, tmp_path: Path) -> None:
        save("deepseek_v32", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing") as error:
            make_llm(tmp_path)
        assert isinstance(error.value.__cause__, ParallelError)

    def test_closing_ends_the_ranks(self, checkpoint: Path) -> None:
        llm = make_llm(checkpoint)
        pids = pids_of(llm)
        assert len(pids) == 2
        assert all(exists(pid) for pid in pids)
        llm.close()
        llm.close()
        assert gone(pids, 5.0)
        with pytest.raises(ParallelError, match="closed"):
            answers(llm)

    def test_ranks_end_with_the_last_reference(self, checkpoint: Path) -> None:
        llm = make_llm(checkpoint)
        pids = pids_of(llm)
        del llm
        assert gone(pids)


def test_real_processes_answer_alike_and_do_not_outlive_who_started_them(
    checkpoint: Path, one: LLM
) -> None:
    """The only test with fresh interpreters, which is what users get."""
    near, far = Pipe()

    def front() -> None:
        llm = make_llm(checkpoint)
        far.send((pids_of(llm), answers(llm)))
        hang()

    process = fork(front, {})
    far.close()
    assert near.poll(300), "the ranks do not start"
    pids, got = near.recv()
    assert got == answers(one)
    assert all(exists(pid) for pid in pids)
    process.kill()
    process.wait()
    assert gone(pids)


def launch(path: Path, sent: Any) -> list[Forked]:
    """Two ranks of a launcher such as torchrun, which send what their scripts come to."""

    def script() -> None:
        with make_llm(path) as llm:
            try:
                sent.send(answers(llm))
            except ParallelError as error:
                sent.send(error)
                raise

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}
    places = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1))
    return [fork(script, {**place, **group}) for place in places]


def test_under_a_launcher_rank_0_goes_on_and_the_others_serve(checkpoint: Path, one: LLM) -> None:
    near, far = Pipe()
    ranks = launch(checkpoint, far)
    assert near.poll(120), "rank 0 has no answers"
    assert near.recv() == answers(one)
    assert [rank.wait(30) for rank in ranks] == [0, 0]
    assert not near.poll(), "only rank 0 goes on"


def test_under_a_launcher_rank_0_learns_why_another_failed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault_on(monkeypatch, 1, boom)
    near, far = Pipe()
    ranks = launch(checkpoint, far)
    assert near.poll(120), "rank 0 has no answers"
    error = near.recv()
    assert isinstance(error, ParallelError)
    assert error.rank == 1
    assert 'raise RuntimeError("boom")' in error.traceback
    assert [rank.wait(30) for rank in ranks] == [1, 1]


def test_a_launcher_with_other_ranks_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="started 3"):
        make_llm(checkpoint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "tensor_parallel_size: expected at least 1"),
        ({"size": 3}, "3 does not divide num_attention_heads = 4"),
        ({"verify_selection": -1}, "verify_selection"),
        ({"parallel_timeout": 0.0}, "parallel_timeout"),
        ({"speculative_num_steps": 2}, "speculative_num_steps"),
        ({"host_cache_tokens": 64}, "host_cache_tokens"),
        ({"tokenizer": lambda: None}, "tokenizer: cannot be sent"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_go_together_is_refused(
    checkpoint: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(checkpoint, **options)


def test_a_loaded_model_is_refused() -> None:
    model = BY_NAME["deepseek_v32"].build()
    with pytest.raises(ConfigError, match="pass the path"):
        LLM(model, tensor_parallel_size=2)


def test_a_plan_travels_as_numbers() -> None:
    plan = StepPlan((5, 6, 7, 8), (1, 3), (9, 3), (2, 0), ((0, 1, 7), (2, 0, 3)))
    empty = StepPlan((), (), (), (), ())
    for sent in (plan, empty):
        assert Message("step", [*sent.to_ints(), 0, 0]).plan == sent


def test_a_checksum_sees_order_rows_and_earlier_layers() -> None:
    zero = torch.zeros((), dtype=torch.int64)
    slots = torch.tensor([[3, 8, -1], [4, 9, 11]], dtype=torch.int32)
    others = [slots.flip(0), slots.flip(1), slots[:1], slots.where(slots != -1, 0)]
    sums = {int(checksum(other, zero)) for other in [slots, *others]}
    assert len(sums) == 5
    once = checksum(slots, zero)
    assert int(checksum(others[0], once)) != int(checksum(slots, checksum(others[0], zero)))
