"""What can go wrong, as types a caller can catch.

Every error a user can cause derives from `TopkapiError` and from the built-in that
Python users would expect (`ValueError`, `MemoryError`, ...). A message says what was
looked at, what was expected, what came, and what to do.
"""

from __future__ import annotations


class TopkapiError(Exception):
    """Base of every error that Topkapi raises on purpose."""


class ShapeError(TopkapiError, ValueError):
    """A tensor argument has the wrong rank, size, dtype or device."""


class ConfigError(TopkapiError, ValueError):
    """An option or a model configuration has a value that cannot work."""


class KernelRefusedError(TopkapiError, RuntimeError):
    """No usable kernel, or the one named by the user cannot take this problem."""


class DeviceFailedError(TopkapiError, RuntimeError):
    """A kernel broke the device for this process (it read outside its memory, say)."""


class CacheExhaustedError(TopkapiError, MemoryError):
    """The paged cache, or the request table, has no room left."""


class CacheCorruptionError(TopkapiError, RuntimeError):
    """A page was freed twice, or used without being allocated."""


class UnsupportedModelError(TopkapiError, ValueError):
    """The model is not a DSA model, or a variant that Topkapi does not know."""


class CheckpointError(TopkapiError, ValueError):
    """A checkpoint on disk is missing tensors, misshapen, or in a refused format."""


class RequestError(TopkapiError, ValueError):
    """One request is invalid; the others of its batch are not affected."""


class ParallelError(TopkapiError, RuntimeError):
    """A rank of a model that is split over several processes failed, and the run has ended.

    `rank` is the one at fault, None where nobody can say; `traceback` is its own, as text, empty
    when it died without a word.
    """

    def __init__(self, message: str, *, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class SelectionMismatchError(ParallelError):
    """Two ranks selected different tokens in the same step."""
