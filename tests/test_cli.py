"""The `topkapi` command: answers on stdout, the rest on stderr, one line for what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import topkapi
from engine.conftest import make_model, make_tokenizer
from topkapi.cli import app
from topkapi.config import BackendOptions
from topkapi.engine.llm import LLM
from topkapi.engine.request import SamplingParams

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    tokenizer = make_tokenizer()
    make_model(len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run(*arguments: str, **options: Any) -> Any:
    return CliRunner().invoke(app, list(arguments), **options)


def answer_of(tiny: Path, prompt: str, **choices: Any) -> str:
    llm = LLM(tiny, device="cpu")
    [output] = llm.generate([prompt], SamplingParams(max_tokens=6, **choices), use_tqdm=False)
    return output.text + "\n"


def common(tiny: Path) -> list[str]:
    return ["--model", str(tiny), "--max-tokens", "6", "--device", "cpu"]


def test_version_is_the_packages() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert topkapi.__version__ == declared
    assert run("--version").stdout == f"topkapi {declared}\n"


def test_generate_streams_the_answer_to_stdout(tiny: Path) -> None:
    result = run("generate", *common(tiny), "the question")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == answer_of(tiny, "the question", temperature=0)
    assert "6 tokens in" in result.stderr


def test_generate_writes_a_trace(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    result = run("generate", *common(tiny), "--trace", str(file), "the question")
    assert result.exit_code == 0, result.stderr
    steps = [event for event in json.loads(file.read_text()) if event.get("tid") == 1]
    assert len(steps) == 1 + 6  # the track's name, a prompt, five more tokens


def test_options_mean_what_the_library_means(tiny: Path, tmp_path: Path) -> None:
    words = ["--min-p", "0.02", "--repetition-penalty", "1.2", "--presence-penalty", "0.5"]
    words += ["--frequency-penalty", "0.25", "--min-tokens", "4", "--logit-bias", "40=3.5"]
    words += ["--temperature", "0.9", "--seed", "5", "--stop", "zz", "--stop", "yy"]
    choices = {
        "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_tokens": 4,
        "frequency_penalty": 0.25, "logit_bias": {40: 3.5}, "temperature": 0.9, "seed": 5,
        "stop": ["zz", "yy"],
    }  # fmt: skip
    result = run("generate", *common(tiny), *words, "the question")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == answer_of(tiny, "the question", **choices)


def test_generate_obeys_a_schema_file(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["yes", "no"]}')
    result = run("generate", *common(tiny), "--json-schema", str(file), "the question")
    assert json.loads(result.stdout) in ("yes", "no"), result.stderr


def test_every_engine_option_reaches_the_engine(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    class Recorder(LLM):
        def __init__(self, model: Any, **options: Any) -> None:
            made.append(options)
            super().__init__(model, **options)

    monkeypatch.setattr("topkapi.engine.llm.LLM", Recorder)
    trace = tmp_path / "trace.json"
    words = ["--max-tokens-in-cache", "128", "--max-context-len", "96", "--no-prefix-cache"]
    words += ["--max-batch-tokens", "32", "--max-running-requests", "3", "--deterministic"]
    words += ["--speculative-num-steps", "auto", "--trace", str(trace), "--dtype", "fp32"]
    words += ["--no-cuda-graphs", "--cuda-graph-batch-sizes", "1,8", "--page-size", "16"]
    words += ["--memory-fraction", "0.5", "--selection-stats-every", "3"]
    words += ["--config-overrides", '{"index_topk": 8}']
    result = run("chat", *common(tiny), *words, input="hi\n")
    assert result.exit_code == 0, result.stderr
    [options] = made
    assert options.pop("backend_options").deterministic
    assert options == {
        "device": "cpu", "dtype": "fp32", "kv_cache_dtype": "auto", "max_tokens_in_cache": 128,
        "max_context_len": 96, "max_batch_tokens": 32, "max_running_requests": 3,
        "enable_prefix_cache": False, "host_cache_tokens": 0, "speculative_num_steps": "auto",
        "tensor_parallel_size": 1, "trace": trace, "cuda_graphs": False, "compile": False,
        "cuda_graph_batch_sizes": [1, 8], "page_size": 16, "memory_fraction": 0.5,
        "selection_stats_every": 3, "config_overrides": {"index_topk": 8}, "verify_selection": 64,
        "parallel_timeout": 600.0,
    }  # fmt: skip


def test_the_options_cover_the_library() -> None:
    """A new field of `SamplingParams` or option of `LLM` is offered, or left out on purpose."""
    from dataclasses import fields
    from inspect import signature

    from topkapi.cli_options import EngineChoices, SamplingChoices

    told = {item.name for item in fields(SamplingChoices)}
    left_out = {"stop_token_ids", "logprobs", "prompt_logprobs", "ignore_eos", "n"}
    left_out |= {"skip_special_tokens"}
    assert told | left_out == {item.name for item in fields(SamplingParams)}
    offered = {*EngineChoices().options(), "model"}
    parameters = dict(signature(LLM.__init__).parameters)
    assert offered | {"self", "tokenizer"} == set(parameters)
    same = EngineChoices().options()
    assert same.pop("backend_options") == BackendOptions.from_environment()
    assert same == {name: parameters[name].default for name in same}


def test_generate_samples_with_a_seed_and_reads_stdin(tiny: Path) -> None:
    options = ["--temperature", "1.5", "--seed", "3", "--top-p", "0.9", "--top-k", "50"]
    result = run("generate", *common(tiny), *options, input="the question")
    choices = {"temperature": 1.5, "seed": 3, "top_p": 0.9, "top_k": 50}
    assert result.stdout == answer_of(tiny, "the question", **choices)


def test_a_context_file_goes_before_the_question(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "context.txt"
    file.write_text("für die Größe\n", encoding="utf-8")
    result = run("generate", *common(tiny), "--context", str(file), "why?")
    prompt = "<user>für die Größe\n\nwhy?<assistant>"
    assert result.stdout == answer_of(tiny, prompt, temperature=0)


def test_chat_keeps_the_conversation(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "context.txt"
    file.write_text("a file", encoding="utf-8")
    lines = "\none?\ntwo?\n/reset\none?\n/quit\nnever\n"
    result = run("chat", *common(tiny), "--context", str(file), input=lines)
    assert result.exit_code == 0, result.stderr
    first = answer_of(tiny, "<user>a file\n\none?<assistant>", temperature=0)
    history = f"<user>a file\n\none?<assistant>{first[:-1]}<user>two?<assistant>"
    assert result.stdout == first + answer_of(tiny, history, temperature=0) + first


def test_chat_survives_a_question_that_does_not_fit(tiny: Path) -> None:
    result = run("chat", *common(tiny), input=f"{'x' * 300}\nhi\n")
    assert result.exit_code == 0
    assert "error: the prompt has" in result.stderr
    assert result.stdout == answer_of(tiny, "<user>hi<assistant>", temperature=0)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["generate", "--model", "/nowhere", "x"], 1, "/nowhere"),
        (["generate", "--temperature", "-1", "x"], 1, "temperature"),
        (["generate", "--device", "abacus", "--model", "TINY", "x"], 1, "abacus"),
        (["generate", "--model", "TINY", "--dtype", "int3", "x"], 1, "int3"),
        (["generate", "--model", "TINY", "--device", "cpu", ""], 1, "empty"),
        (["generate", "--context", "/nowhere", "x"], 2, "/nowhere"),
        (["generate", "--max-tokens", "many", "x"], 2, "max-tokens"),
        (["generate", "--logit-bias", "7", "x"], 1, "TOKEN_ID=NUMBER"),
        (["generate", "--speculative-num-steps", "9", "--model", "TINY", "x"], 1, "0 to 4"),
        (["generate", "--cuda-graph-batch-sizes", "1,b", "x"], 1, "1,b"),
        (["generate", "--config-overrides", "{", "x"], 1, "config_overrides"),
        (["generate", "--config-overrides", "[]", "x"], 1, "JSON object"),
        (["inspect", "/nowhere"], 1, "/nowhere"),
        (["doctor", "--cache-format", "abacus"], 1, "abacus"),
        (["doctor", "--model", "/nowhere"], 1, "/nowhere"),
        (["frobnicate"], 2, "frobnicate"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_errors_are_one_line(tiny: Path, arguments: list[str], code: int, word: str) -> None:
    result = run(*(str(tiny) if item == "TINY" else item for item in arguments))
    assert result.exit_code == code, result.output
    assert word in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    if code == 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1


def test_a_prompt_file_that_is_not_text(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "context.bin"
    file.write_bytes(b"\xff\xfe\x00")
    result = run("generate", *common(tiny), "--context", str(file), "why?")
    assert result.exit_code == 2
    assert "--context" in result.stderr


def test_inspect(tiny: Path) -> None:
    result = run("inspect", str(tiny), "--json")
    summary = json.loads(result.stdout)
    model = make_model(290)
    assert summary["parameters"] == sum(item.numel() for item in model.state_dict().values())
    assert summary["config"]["index_topk"] == model.config.index_topk
    assert summary["cache_bytes"]["fp32"] == 2 * (16 + 8 + 12) * 4
    shown = run("inspect", str(tiny)).stdout
    assert "deepseek_v32" in shown
    assert f"{summary['parameters']:,}" in shown


def test_doctor(tiny: Path) -> None:
    report = json.loads(run("doctor", "--json", "--device", "cpu").stdout)
    assert report["versions"]["torch"]
    assert set(report["kernels"]) == {"prefill", "decode"}
    for kernels in report["kernels"].values():
        assert set(kernels) == set(topkapi.ops.__all__)
        for verdicts in kernels.values():
            assert any(item["kernel"] == "torch" and not item["reason"] for item in verdicts)
    shown = run("doctor", "--device", "cpu", "--model", str(tiny), "--heads", "2").stdout
    for words in ("sparse_mla", "torch", "tokens that fit", "80% of the memory free now"):
        assert words in " ".join(shown.split())


def test_bench_is_delegated() -> None:
    result = run("bench", "--help")
    assert result.exit_code == 0
    assert "demo-recall" in result.stdout


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "topkapi.cli", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def test_closed_stdin_ends_chat_cleanly(tiny: Path) -> None:
    """A real process, whose standard input does not exist."""
    process = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command("chat", *common(tiny))],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=120,
    )
    assert (process.returncode, process.stdout) == (0, "")
    assert "Traceback" not in process.stderr


def test_interrupt_ends_chat_cleanly(tiny: Path) -> None:
    with subprocess.Popen(
        command("chat", *common(tiny)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
