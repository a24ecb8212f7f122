"""How long does a call take between others, as in a decoding step?

A replay of one call holds the launch into an idle GPU. So a case's calls stand in line as well, in
one graph, each on a set of inputs of its own (`inputs.make_sets`), as the layers of a model have
them. The cache is flushed before the replay, each set is read once in it: nobody finds inputs in
the second-level cache. A call's steady time is the replay's over the number of calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from topkapi.bench.cases import BenchCase
from topkapi.bench.clock import MOST_IN_LINE, Call, Timed, interleaved, prepare_line
from topkapi.bench.contenders import FAILURES, contenders, in_words
from topkapi.bench.inputs import Arguments, make_sets
from topkapi.bench.record import quantiles

# Calls that take longer have no steady time: what one replay adds is nothing to them.
LONGEST_SECONDS = 1e-3
# The fastest kernel's line takes about so long, within bounds: what the replay adds is then less
# than one part in a hundred.
_LINE_SECONDS = 4e-4
_FEWEST_IN_LINE = 8
_MIN_ROUNDS, _MAX_ROUNDS = 5, 10
# Caches that are used in turn hold so many times what the second-level cache does: no more than
# one part in 64 of what a call reads can still be there.
_POOL_CACHES = 64


def steady_times(
    case: BenchCase,
    arguments: Arguments,
    single: Mapping[str, float],
    vs: Collection[str],
    without: Collection[str],
    seconds: float,
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    """Facts of each contender whose `single` time is short: `steady_seconds` (p20, p50, p80 of the
    rounds, in each of which all lines run), `steady_calls` and `steady_rounds`; `steady_failed`, in
    words, where the line died; nothing of one that cannot be captured. All rounds together take
    about `seconds`. Synchronises.
    """
    short = {name: time for name, time in single.items() if time < LONGEST_SECONDS}
    if case.phase != "decode" or not short:
        return {}
    fitting = round(_LINE_SECONDS / min(short.values()))
    count = max(_FEWEST_IN_LINE, min(MOST_IN_LINE, fitting))
    calls: dict[str, list[Call]] = {name: [] for name in short}
    for one in make_sets(case, arguments, count, _pool_bytes(device)):
        for contender in contenders(case, one, vs, without, device):
            if contender.name in calls:
                calls[contender.name].append(contender.call)
    found: dict[str, dict[str, Any]] = {}
    lines: dict[str, Timed] = {}
    for name, line in calls.items():
        try:
            timed = prepare_line(line, device)
        except FAILURES as error:
            found[name] = {"steady_failed": in_words(error)}
            continue
        if timed.how != "launches":
            lines[name] = timed
    total = count * sum(short[name] for name in lines)
    rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(seconds / max(total, 1e-9))))
    for name, times in interleaved(lines, rounds, device).items():
        facts = {"steady_calls": count, "steady_rounds": rounds}
        found[name] = {"steady_seconds": quantiles(times), **facts}
    return found


def _pool_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    held: int = torch.cuda.get_device_properties(device).L2_cache_size
    return _POOL_CACHES * held
