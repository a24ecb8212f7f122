"""What has an engine done so far, and how full is it now? Plain numbers, for `LLM.stats`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from topkapi.cache.leases import PageLeases
from topkapi.engine.graphs import GraphStats
from topkapi.engine.selection_stats import LayerSelection
from topkapi.engine.speculation_stats import SpeculationStats


@dataclass(frozen=True)
class CacheStats:
    """The token cache, in pages of `page_size` tokens.

    `held_pages` belong to requests under way, `kept_pages` to nobody: they wait to be used again
    and go when room is needed. `host_pages` of at most `num_host_pages` wait in host memory.
    Tokens are those of all requests as they were admitted.
    """

    page_size: int
    num_pages: int
    held_pages: int
    kept_pages: int
    host_pages: int
    evicted_pages: int
    restored_pages: int
    looked_up_tokens: int
    found_tokens: int

    @property
    def occupancy(self) -> float:
        """Share of the pages that requests under way hold."""
        return self.held_pages / self.num_pages

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up that did not have to be computed; 0 before the first."""
        return self.found_tokens / max(self.looked_up_tokens, 1)

    @classmethod
    def of(cls, leases: PageLeases, looked_up: int, found: int) -> CacheStats:
        """Read the leases as they are."""
        tree = leases.tree
        return cls(
            page_size=leases.page_size,
            num_pages=leases.num_pages,
            held_pages=leases.num_pages - leases.available,
            kept_pages=leases.available - leases.num_free,
            host_pages=tree.num_host_pages if tree else 0,
            evicted_pages=tree.num_evicted if tree else 0,
            restored_pages=tree.num_restored if tree else 0,
            looked_up_tokens=looked_up,
            found_tokens=found,
        )


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made, and how it stands.

    `seconds` by phase, see `timeline`. `finished` counts requests by finish reason. `selection` is
    empty unless asked for. `graphs` are the steps that are replayed. `speculation` is None where
    nothing is drafted.
    """

    running: int
    waiting: int
    steps: int
    computed_tokens: int
    preemptions: int
    finished: dict[str, int]
    seconds: dict[str, float]
    cache: CacheStats
    selection: list[LayerSelection]
    graphs: GraphStats = field(default_factory=GraphStats)
    speculation: SpeculationStats | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, rates included."""
        values = asdict(self)
        values["cache"] |= {"occupancy": self.cache.occupancy, "hit_rate": self.cache.hit_rate}
        if self.speculation is not None:
            values["speculation"]["acceptance_length"] = self.speculation.acceptance_length
        return values
