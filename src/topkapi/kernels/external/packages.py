"""Which installed package provides a peer kernel, and how is it loaded?

Nothing is imported, and no library opened, before a kernel of it is asked about; then once per
process. A package that is missing, or that is there and does not load, becomes a reason in words.
Knows no operation.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# What importing a package, or opening a library built for another torch or CUDA, is known to raise.
LOAD_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)


@dataclass(frozen=True)
class Provider:
    """One package, and one way of calling the kernel in it.

    Attributes:
        package: the name it is imported under.
        distributions: names under which its version may be installed.
        load: opens it and gives what the record calls; raises one of `LOAD_ERRORS`.
    """

    package: str
    distributions: tuple[str, ...]
    load: Callable[[], Any]


@dataclass(frozen=True)
class Loaded:
    """A provider that works: what to call, and which version of what."""

    call: Any
    package: str
    version: str


def folder_of(package: str) -> Path | None:
    """Where a top-level package lies, without importing it; None when it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def load_library(package: str, pattern: str) -> None:
    """Open the one library of `package` whose path below it matches `pattern`, registering its
    operators with torch. The package itself is not imported. Raises `ImportError` or `OSError`.
    """
    folder = folder_of(package)
    found = sorted(folder.glob(pattern)) if folder else []
    if not found:
        raise ImportError(f"no {pattern} in it")
    torch.ops.load_library(str(found[0]))  # type: ignore[no-untyped-call]


def version_of(provider: Provider) -> str:
    """The installed version, or `unknown version` for a package without metadata."""
    for name in provider.distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown version"


@lru_cache(maxsize=64)
def probe(providers: tuple[Provider, ...]) -> Loaded | str:
    """The first provider that loads, or why none does. Asked once per process and record."""
    reasons = []
    for provider in providers:
        if folder_of(provider.package) is None:
            continue
        try:
            call = provider.load()
        except LOAD_ERRORS as error:
            # torch says which library did not load, and its cause why.
            cause = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            reasons.append(f"{provider.package} {version_of(provider)} does not load: {cause[0]}")
            continue
        return Loaded(call, provider.package, version_of(provider))
    if reasons:
        return "; ".join(reasons)
    names = [provider.package for provider in providers]
    choice = names[0] if len(names) == 1 else "one of " + ", ".join(names)
    return f"needs the package {choice}; not installed"


def refuse_package(providers: tuple[Provider, ...]) -> str | None:
    """Why no provider works, or None."""
    found = probe(providers)
    return found if isinstance(found, str) else None


def loaded(providers: tuple[Provider, ...]) -> Loaded:
    """What a record that did not refuse calls."""
    found = probe(providers)
    assert isinstance(found, Loaded), "a kernel that refuses every problem was launched"
    return found


def provided_by(providers: tuple[Provider, ...]) -> Callable[[], str | None]:
    """What a record's `provider` is: `package version` of the one in use, or None."""

    def name() -> str | None:
        found = probe(providers)
        return f"{found.package} {found.version}" if isinstance(found, Loaded) else None

    return name
