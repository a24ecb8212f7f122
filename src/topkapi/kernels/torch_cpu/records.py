"""Writing and reading cached records with plain torch: the definition is already vectorised."""

from __future__ import annotations

from topkapi.dispatch import Kernel, Problem
from topkapi.reference import records


def _take_all(problem: Problem) -> str | None:
    return None


WRITE_LATENT = Kernel("torch", "write_latent", _take_all, records.write_latent)
WRITE_INDEX_KEY = Kernel("torch", "write_index_key", _take_all, records.write_index_key)
GATHER_LATENT = Kernel("torch", "gather_latent", _take_all, records.gather_latent)
