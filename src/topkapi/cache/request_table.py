"""Which slot holds position p of a request? One int32 row a request, no pages, no layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from topkapi.errors import CacheCorruptionError, CacheExhaustedError, ConfigError


class ReqToTokenPool:
    """The request-to-token table and its free rows.

    Attributes:
        req_to_token: `[size, max_context_len]` int32; entry `[row, p]` is the slot of position p.
            Entries never written are 0, the dummy slot.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device | str = "cpu") -> None:
        """Raises `ConfigError` for an empty table."""
        if size < 1 or max_context_len < 1:
            raise ConfigError(
                f"ReqToTokenPool: expected at least one row of one token, got {size} rows of "
                f"{max_context_len}"
            )
        self.req_to_token = torch.zeros(size, max_context_len, dtype=torch.int32, device=device)
        self._free = list(range(size - 1, -1, -1))
        self._in_use: set[int] = set()

    @property
    def size(self) -> int:
        """Rows, used or free."""
        return self.req_to_token.shape[0]

    @property
    def max_context_len(self) -> int:
        """Tokens one request may have."""
        return self.req_to_token.shape[1]

    @property
    def available(self) -> int:
        """Rows that can be allocated now."""
        return len(self._free)

    def alloc(self, n: int) -> list[int]:
        """Take `n` rows. Raises `CacheExhaustedError`, taking none, when fewer are free."""
        if n > len(self._free):
            raise CacheExhaustedError(
                f"the request table has {len(self._free)} free rows of {self.size}, {n} were "
                "asked for; wait for requests to finish, or make the table larger"
            )
        rows = [self._free.pop() for _ in range(n)]
        self._in_use.update(rows)
        return rows

    def free(self, rows: Sequence[int]) -> None:
        """Give rows back. Raises `CacheCorruptionError`, freeing none, for a row not in use."""
        if len(set(rows)) != len(rows) or not self._in_use.issuperset(rows):
            raise CacheCorruptionError(
                f"request rows {sorted(rows)} were freed, but in use are {sorted(self._in_use)}"
            )
        self._in_use.difference_update(rows)
        self._free.extend(rows)

    def grow(self, size: int | None = None, max_context_len: int | None = None) -> None:
        """Enlarge the table, keeping its contents.

        `req_to_token` becomes a new tensor: graphs captured over the old one must be captured anew.
        """
        old = self.req_to_token
        size = old.shape[0] if size is None else size
        width = old.shape[1] if max_context_len is None else max_context_len
        if size < old.shape[0] or width < old.shape[1]:
            raise ConfigError(
                f"ReqToTokenPool.grow: expected at least {list(old.shape)}, got {[size, width]}"
            )
        self.req_to_token = old.new_zeros(size, width)
        self.req_to_token[: old.shape[0], : old.shape[1]] = old
        self._free[:0] = range(size - 1, old.shape[0] - 1, -1)
