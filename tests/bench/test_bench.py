"""Do the measuring commands check before they time, and say what went wrong?"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from topkapi.bench import cpu, record
from topkapi.bench.command import app
from topkapi.bench.record import environment, quantiles, read_lines, write_lines
from topkapi.errors import ConfigError

CPU = torch.device("cpu")


def test_ratios_are_of_pairs() -> None:
    def row(side: str, repeat: int, seconds: float) -> dict[str, object]:
        figures = dict.fromkeys(cpu.FIGURES, seconds)
        return {"side": side, "context": 512, "repeat": repeat, "tokens": [1, 2], **figures}

    rows = [row("topkapi", 0, 1.0), row("transformers-sdpa", 0, 3.0)]
    rows += [row("topkapi", 1, 4.0), row("transformers-sdpa", 1, 8.0)]
    rows += [row("topkapi", 2, 2.0), row("transformers-sdpa", 2, 10.0)]
    ours, theirs = cpu.summarise(rows)
    assert ours["prefill_seconds"] == 2.0
    assert theirs["prefill_seconds_ratio"] == 3.0  # of 3, 2 and 5
    assert theirs["same_tokens"] is True
    rows[1] = {"side": "transformers-sdpa", "context": 512, "failed": "out of memory"}
    assert cpu.summarise(rows)[1]["failed"] == "out of memory"


def test_a_side_that_dies_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 1, "", "Traceback\nMemoryError: no room\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert cpu.run_side("topkapi", "x", 512, 3, "float32")["failed"] == "MemoryError: no room"


def test_arguments_are_checked_before_any_work() -> None:
    with pytest.raises(ConfigError, match="unknown side vllm"):
        cpu.check_arguments(["topkapi", "vllm"], [512], 8192)
    with pytest.raises(ConfigError, match=r"256\.\.8192, got \[16\]"):
        cpu.check_arguments(["topkapi"], [16, 512], 8192)


@dataclass
class Refused:
    arguments: list[str]
    word: str


@pytest.mark.parametrize(
    "case",
    [
        Refused(["cpu", "--contexts", "a,b"], "contexts: expected numbers"),
        Refused(["cpu", "--dtype", "int8"], "dtype: expected float32"),
        Refused(["speculation", "--steps", "auto,x"], "steps: expected numbers"),
        Refused(["speculation", "--batches", "a"], "batches: expected numbers"),
        Refused(["serve", "--device", "cpu", "--requests", "0"], "requests: expected at least 1"),
        Refused(["serve", "--device", "cpu", "--length-scale", "0"], "length_scale: expected"),
    ],
    ids=lambda case: case.word,
)
def test_the_commands_refuse_in_words(case: Refused) -> None:
    result = CliRunner().invoke(app, case.arguments)
    assert isinstance(result.exception, ConfigError)
    assert case.word in str(result.exception)


def test_a_report_of_no_file_is_a_usage_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ops-report", str(tmp_path / "none.jsonl")])
    assert result.exit_code == 2


def test_a_changed_tree_is_not_called_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    for tracked, head, changed, named in (
        ("__init__.py", "abc1234", "", "abc1234"),
        ("__init__.py", "abc1234", " M src/topkapi/x.py", "abc1234-dirty"),
        ("", "abc1234", "", None),  # a virtual environment in somebody's repository
        ("", "", "", None),
    ):
        answers = {"ls-files": tracked, "rev-parse": head, "status": changed}
        monkeypatch.setattr(record, "_git", lambda _, command, *__, to=answers: to[command])
        assert environment(CPU)["commit"] == named


def test_a_machine_without_git_measures_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment(CPU)["commit"] is None


def test_results_are_kept_with_their_facts(tmp_path: Path) -> None:
    facts = environment(CPU)
    assert facts["torch"] == str(torch.__version__)
    assert facts["threads"] == torch.get_num_threads()
    path = tmp_path / "deep" / "rows.jsonl"
    write_lines(path, [facts, {"a": 1}])
    assert read_lines(path) == [facts, {"a": 1}]
    assert quantiles([3.0, 1.0, 2.0, 5.0, 4.0]) == {"p20": 2.0, "p50": 3.0, "p80": 4.0}
