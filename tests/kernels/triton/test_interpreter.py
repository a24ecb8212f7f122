"""The Triton kernels against the reference on a CPU, in Triton's interpreter.

Kernels are interpreted only if TRITON_INTERPRET=1 holds when their module is first imported, and
other tests may have imported them: each group of `interpreted.py` runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("interpreted.py")
GROUPS = (
    "test_sparse_mla",
    "test_topk",
    "test_indexer_logits",
    "test_select",
    "test_records or test_latents or test_step_metadata",
    "test_index_queries or test_e4m3 or test_rope",
)


@pytest.mark.parametrize("group", GROUPS)
def test_in_the_interpreter(group: str) -> None:
    pytest.importorskip("triton")
    root = FILE.parents[3]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root / "tests"))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FILE)]
    run = subprocess.run(
        [*command, "-k", group, "-W", "ignore"],
        env=environment, cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
