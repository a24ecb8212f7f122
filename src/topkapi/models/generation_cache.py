"""What `model.generate()` holds between steps: a Transformers `Cache` over Topkapi's paged pools.

Transformers counts columns, padding included; the pools hold valid tokens alone. `DsaCache` keeps
both: the columns with their validity on the host, the tokens in pages that grow by doubling. Knows
nothing about attention, but that a `DsaStep` is what a forward pass needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import ForwardBatch, ForwardMode
from topkapi.cache import NSATokenToKVPool, PageAllocator, ReqToTokenPool
from topkapi.config import BackendOptions, DsaConfig
from topkapi.errors import ConfigError, RequestError
from topkapi.layout import PAGE_SIZE
from topkapi.models.attention import DsaStep, StepPart


@dataclass
class _Sequence:
    """One batch row: its row of the request table, its pages, and its number of valid tokens."""

    row: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class DsaCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `DsaCache`, as far as Transformers asks layers and not the cache."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: DsaCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Any, value_states: Any) -> NoReturn:
        self.update(key_states, value_states)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: tokens come in through `DsaCache.begin_step`, in the attached model."""
        raise ConfigError(
            "a cache of topkapi.attach was given to a model that is not attached (or no longer); "
            "attach it, or let generate() make a new cache"
        )

    update_indexer = update

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.columns

    def get_max_length(self) -> int:
        return -1


class DsaCache(Cache):  # type: ignore[misc]
    """Cached tokens of a batch, in paged pools that double when they are full.

    `crop`, `reorder_cache`, `batch_repeat_interleave`, `batch_select_indices` and `reset` do what
    they do for Transformers' `DynamicCache`, always to both records of a token. `copy.deepcopy`
    gives an independent cache. Buffers are never inference tensors, so that a cache filled under
    `torch.inference_mode()` can be continued outside of it.
    """

    def __init__(
        self,
        config: DsaConfig,
        *,
        kv_cache_dtype: str,
        device: torch.device,
        options: BackendOptions,
        rows_at_once: int,
    ) -> None:
        """An empty cache; memory is taken by the first step. `rows_at_once` bounds the query rows
        that attention handles together. Raises `ConfigError` for a dtype the pool does not know.
        """
        self.config = config
        self.columns = 0
        self._options = options
        self._rows_at_once = rows_at_once
        self._device = device
        self._pages = PageAllocator(2)
        with torch.inference_mode(False):
            self._pool = NSATokenToKVPool(config, 2, kv_cache_dtype=kv_cache_dtype, device=device)
            self._table = ReqToTokenPool(1, PAGE_SIZE, device=device)
        self._sequences: list[_Sequence] = []
        self._valid = torch.ones(0, 0, dtype=torch.bool)
        self._backends: list[NativeSparseAttnBackend] = []
        self._columns_in_step = 0
        super().__init__(layers=[DsaCacheLayer(self) for _ in range(config.num_hidden_layers)])

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first step."""
        return len(self._sequences) or -1

    @property
    def lengths(self) -> list[int]:
        """Valid tokens cached for each row of the batch."""
        return [sequence.length for sequence in self._sequences]

    @property
    def nbytes(self) -> int:
        """Bytes of the pools, free pages included."""
        return self._pool.nbytes()

    def begin_step(
        self, batch_size: int, new_columns: int, mask: torch.Tensor | None, device: torch.device
    ) -> DsaStep:
        """Make room for `new_columns` more columns and describe the forward pass over them.

        `mask [batch_size, columns + new_columns]` is the padding mask (0: padding), None when all
        is valid. Synchronises once when there is a mask. Raises `RequestError` when the batch or
        the mask does not continue what is cached, and `ConfigError` on another device.
        """
        self._check_device(device)
        if not self._sequences:
            self._take_rows(batch_size)
        if batch_size != len(self._sequences):
            raise RequestError(
                f"cache: holds a batch of {len(self._sequences)}, the input has {batch_size} rows; "
                "use batch_repeat_interleave or batch_select_indices on the cache first"
            )
        new = self._new_validity(new_columns, mask)
        q_lens = [int(count) for count in new.sum(1)]
        self._extend(self._sequences, q_lens)
        self._valid = torch.cat((self._valid, new), dim=1)
        self.columns += new_columns
        self._columns_in_step = new_columns
        rows = None if bool(new.all()) else new.flatten().nonzero()[:, 0].to(device)
        return DsaStep.of_parts(self._parts(q_lens), rows)

    def end_step(self, *, failed: bool) -> None:
        """Close the step; one that failed is taken back, as if it had not begun."""
        columns, self._columns_in_step = self._columns_in_step, 0
        if failed and columns:
            self.crop(-columns)
            if not self.columns:
                self.reset()

    def begin_packed_step(self, q_lens: Sequence[int], device: torch.device) -> DsaStep:
        """A step over whole sequences that lie one after another; nothing can continue it.

        Raises `ConfigError` on another device.
        """
        self._check_device(device)
        assert not self._sequences, "a packed step has a cache of its own"
        self._take_rows(len(q_lens))
        self._extend(self._sequences, q_lens)
        return DsaStep.of_parts(self._parts(q_lens), None)

    def _check_device(self, device: torch.device) -> None:
        if device != self._device:
            raise ConfigError(f"cache: is on {self._device}, the model's input on {device}")

    def _new_validity(self, new_columns: int, mask: torch.Tensor | None) -> torch.Tensor:
        """`[B, new_columns]` bool on the host."""
        shape = (len(self._sequences), self.columns + new_columns)
        if mask is None:
            if not bool(self._valid.all()):
                raise RequestError(
                    "attention_mask: the cached tokens were left-padded, so the mask of the whole "
                    f"sequence is needed, {list(shape)}; got None"
                )
            return torch.ones(shape[0], new_columns, dtype=torch.bool)
        if tuple(mask.shape) != shape:
            raise RequestError(
                f"attention_mask: expected {list(shape)} (cached columns and new ones), got "
                f"{list(mask.shape)}"
            )
        host = mask.to(device="cpu", dtype=torch.bool)
        if not torch.equal(host[:, : self.columns], self._valid):
            raise RequestError(
                "attention_mask: it hides or shows other cached tokens than when they were cached"
            )
        return host[:, self.columns :]

    @torch.inference_mode(False)
    def _take_rows(self, count: int) -> None:
        if count > self._table.available:
            self._table.grow(size=self._table.size + count - self._table.available)
        self._sequences = [_Sequence(row) for row in self._table.alloc(count)]
        self._valid = torch.ones(count, 0, dtype=torch.bool)

    @torch.inference_mode(False)
    def _extend(self, sequences: Sequence[_Sequence], counts: Sequence[int]) -> None:
        """Give each row pages for its count of more tokens, and the table their slots.

        Pools and table grow first, to at least double, so that running out of memory changes
        nothing else.
        """
        lengths = [s.length + count for s, count in zip(sequences, counts, strict=True)]
        needed = [
            self._pages.pages_for(length) - len(s.pages)
            for s, length in zip(sequences, lengths, strict=True)
        ]
        missing = sum(needed) - self._pages.available
        if missing > 0:
            total = self._pages.num_pages + max(missing, self._pages.num_pages)
            self._pool.grow(total)
            self._pages.grow(total)
        longest = self._pages.pages_for(max(lengths, default=0)) * PAGE_SIZE
        if longest > self._table.max_context_len:
            self._table.grow(max_context_len=max(longest, 2 * self._table.max_context_len))
        for sequence, length, count in zip(sequences, lengths, needed, strict=True):
            sequence.length = length
            if count:
                first = len(sequence.pages) * PAGE_SIZE
                new = self._pages.alloc(count)
                sequence.pages += new
                slots = _slots(new).to(self._device, torch.int32)
                self._table.req_to_token[sequence.row, first : first + len(slots)] = slots

    def _parts(self, q_lens: Sequence[int]) -> list[StepPart]:
        """Cut the step's rows into parts of at most `rows_at_once`, each with its own metadata."""
        parts: list[StepPart] = []
        total = sum(q_lens)
        for first in range(0, total, self._rows_at_once):
            last = min(first + self._rows_at_once, total)
            part_q, part_kv, rows, start = [], [], [], 0
            for sequence, count in zip(self._sequences, q_lens, strict=True):
                low, high = max(first - start, 0), min(last - start, count)
                if low < high:
                    part_q.append(high - low)
                    part_kv.append(sequence.length - count + high)
                    rows.append(sequence.row)
                start += count
            mode = ForwardMode.DECODE if set(part_q) == {1} else ForwardMode.EXTEND
            batch = ForwardBatch.from_lengths(mode, part_q, part_kv, rows, self._table, self._pool)
            backend = self._backend(len(parts))
            backend.init_forward_metadata(batch)
            parts.append(StepPart(backend, batch, first, last))
        return parts

    def _backend(self, index: int) -> NativeSparseAttnBackend:
        """Metadata is a backend's state, so the parts of a step have a backend each."""
        while len(self._backends) <= index:
            self._backends.append(
                NativeSparseAttnBackend(
                    self.config,
                    req_to_token_pool=self._table,
                    token_to_kv_pool=self._pool,
                    device=self._device,
                    options=self._options,
                )
            )
        return self._backends[index]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns: `-n` removes n of them, as in Transformers' caches."""
        if tokens_to_remove > 0:
            raise RequestError(
                f"crop: expected a negative number of tokens to remove, got {tokens_to_remove}"
            )
        kept = max(self.columns + tokens_to_remove, 0)
        for sequence, removed in zip(
            self._sequences, self._valid[:, kept:].sum(1).tolist(), strict=True
        ):
            sequence.length -= int(removed)
            pages = self._pages.pages_for(sequence.length)
            self._pages.free(sequence.pages[pages:])
            del sequence.pages[pages:]
        self._valid = self._valid[:, :kept].clone()
        self.columns = kept

    def reset(self) -> None:
        """Forget everything; memory is kept for the next batch."""
        for sequence in self._sequences:
            self._pages.free(sequence.pages)
        self._table.free([sequence.row for sequence in self._sequences])
        self._sequences, self.columns = [], 0
        self._valid = torch.ones(0, 0, dtype=torch.bool)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i continues what row `beam_idx[i]` held. Only rows that are doubled are copied."""
        self._rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        count = len(self._sequences)
        self._rearrange([row for row in range(count) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (numbers, or a bool mask over the rows), in that order."""
        order = torch.arange(len(self._sequences))[indices.to("cpu")]
        self._rearrange(order.tolist())

    def _rearrange(self, order: Sequence[int]) -> None:
        old = self._sequences
        if not old:
            return
        for index in sorted(set(range(len(old))) - set(order)):
            self._pages.free(old[index].pages)
            self._table.free([old[index].row])
        taken: set[int] = set()
        sequences = []
        for index in order:
            sequences.append(self._copy(old[index]) if index in taken else old[index])
            taken.add(index)
        self._sequences = sequences
        self._valid = self._valid[list(order)]

    def _copy(self, source: _Sequence) -> _Sequence:
        if not self._table.available:
            self._table.grow(size=2 * self._table.size)
        copy = _Sequence(self._table.alloc(1)[0])
        self._extend([copy], [source.length])
        tokens = slice(0, source.length)
        self._pool.copy_tokens(
            _slots(source.pages)[tokens].to(self._device),
            _slots(copy.pages)[tokens].to(self._device),
        )
        return copy


def _slots(pages: Sequence[int]) -> torch.Tensor:
    """`[pages * PAGE_SIZE]` int64 on the host: every slot of `pages`, in order."""
    first = torch.tensor(pages, dtype=torch.int64)[:, None] * PAGE_SIZE
    return (first + torch.arange(PAGE_SIZE)).flatten()
