"""Cases of every operation as seeded data, with their checks: the same for every kernel."""

from cases.contexts import make_context
from cases.memory import LargestTensor, poisoned_memory
from cases.records import RECORD_CASES, RecordCase
from cases.select import SELECT_CASES, SelectCase
from cases.sparse_mla import (
    EXACT_FP8_CASES,
    SPARSE_MLA_CASES,
    WIDE_SPARSE_MLA_CASES,
    SparseMlaCase,
)
from cases.topk import TOPK_CASES, TopkCase

__all__ = [
    "EXACT_FP8_CASES",
    "RECORD_CASES",
    "SELECT_CASES",
    "SPARSE_MLA_CASES",
    "TOPK_CASES",
    "WIDE_SPARSE_MLA_CASES",
    "LargestTensor",
    "RecordCase",
    "SelectCase",
    "SparseMlaCase",
    "TopkCase",
    "make_context",
    "poisoned_memory",
]
