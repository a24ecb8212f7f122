"""What do the indexers select? How concentrated, and how far back?

Looks at a few rows of every Nth step and adds figures up on the device, one row a layer; they are
read when somebody asks. Rows whose context is not longer than k choose nothing and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.metadata import NSAMetadata

# Rows looked at in a step, each the newest token of a request: one flag a slot and row is written.
_ROWS = 4


@dataclass(frozen=True)
class LayerSelection:
    """Averages over `rows` looked at of one layer. Shares are of the tokens a row selected.

    `recent_share`: among the last k tokens, where a sliding window of the same size would look.
    `back_p50`, `back_p90`: the selected tokens' distance from the newest one, as a share of the
    context (0.45 and 0.9 for a uniform choice). `page_share`: pages that hold any selected token,
    among all pages of the context.
    """

    layer_id: int
    rows: int
    recent_share: float
    back_p50: float
    back_p90: float
    page_share: float


class SelectionStats:
    """Figures of one backend's selections in every `every`-th forward pass, from the first on; 0 is
    never.
    """

    def __init__(self, backend: NativeSparseAttnBackend, every: int) -> None:
        self._backend = backend
        self._every = every
        self._step = -1
        self._paused = False
        config, device = backend.config, backend.device
        self._layers = [i for i in range(config.num_hidden_layers) if config.owns_indexer(i)]
        # Columns: rows, and the sums of LayerSelection's four figures.
        self._sums = torch.zeros(config.num_hidden_layers, 5, dtype=torch.float64, device=device)

    def watch(self, attention_modules: Sequence[Any]) -> None:
        """Look after each call of these `nn.Module`s, one a layer, in the steps that are looked at.

        A module that shares another layer's selection is left out.
        """
        if self._every:
            for layer_id in self._layers:
                attention_modules[layer_id].register_forward_hook(_Look(self, layer_id))

    def look(self, layer_id: int) -> None:
        """Add the layer's selection of this step, if it is one to look at. Never synchronises."""
        if self._paused:
            return
        self._step += layer_id == self._layers[0]
        metadata = self._backend.forward_metadata
        if self._step % self._every or metadata is None:
            return
        slots = metadata.selection.slots
        if slots is not None and not metadata.selects_everything:
            self._sums[layer_id] += _figures(metadata, slots, self._backend.token_to_kv_pool.size)

    def next_pass_is_watched(self) -> bool:
        """Whether the next forward pass is one to look at. Where it is not it counts as done: the
        modules need not be called.
        """
        watched = self._every > 0 and (self._step + 1) % self._every == 0
        self._step += not watched
        return watched

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls in here are not looked at: a module that is captured, not run."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def read(self) -> list[LayerSelection]:
        """The averages so far of every layer that was looked at. Waits for the device."""
        if not self._every:
            return []
        found = []
        for layer_id, (rows, *sums) in enumerate(self._sums.tolist()):
            if rows:
                found.append(LayerSelection(layer_id, int(rows), *(x / rows for x in sums)))
        return found


@dataclass(frozen=True)
class _Look:
    """A forward hook of one layer."""

    stats: SelectionStats
    layer_id: int

    def __call__(self, *_: Any) -> None:
        self.stats.look(self.layer_id)


def _figures(metadata: NSAMetadata, slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """`[5]` float64 sums over the last rows of the first requests; `slots [R, K]`, -1 is none."""
    ends = metadata.cu_seqlens_q[1 : _ROWS + 1].long() - 1
    chosen, lengths = slots[ends].long(), metadata.nsa_seqlens_expanded[ends].long()[:, None]
    # One flag a slot, and a last one where -1 goes.
    flags = torch.zeros(len(ends), num_slots + 1, dtype=torch.bool, device=slots.device)
    flags.scatter_(1, torch.where(chosen < 0, num_slots, chosen), True)
    table = metadata.req_to_token[metadata.buffers.table_rows[:_ROWS], : metadata.max_seq_len_k]
    position = torch.arange(table.shape[1], device=slots.device)
    selected = flags.gather(1, table.long()) & (position < lengths)
    count = selected.sum(1, keepdim=True).clamp_min(1)
    recent = (selected & (position >= lengths - metadata.topk)).sum(1, keepdim=True)
    # How many selected tokens lie at a position or after it.
    after = selected.flip(1).cumsum(1).flip(1)
    back = [_distance(selected & (after >= share * count), lengths) for share in (0.5, 0.9)]
    pages = _by_page(selected, metadata.page_size).any(2).sum(1, keepdim=True)
    all_pages = (-(-lengths // metadata.page_size)).clamp_min(1)
    figures = torch.cat((recent / count, *back, pages / all_pages), dim=1).double()
    chooses = (lengths > metadata.topk).double()
    return torch.cat((chooses, figures * chooses), dim=1).sum(0)


def _distance(far: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """How far back the last position of `far [B, S]` bool is, as a share of `lengths [B, 1]`."""
    position = torch.arange(far.shape[1], device=far.device)
    nearest = torch.where(far, position, -1).amax(1, keepdim=True)
    return (lengths - 1 - nearest) / lengths.clamp_min(1)


def _by_page(selected: torch.Tensor, page_size: int) -> torch.Tensor:
    """`[B, S]` to `[B, pages, page]`, the last page filled up."""
    short = -selected.shape[1] % page_size
    padded = torch.nn.functional.pad(selected, (0, short))
    return padded.view(padded.shape[0], -1, page_size)
