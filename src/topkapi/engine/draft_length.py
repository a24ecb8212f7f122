"""How many drafts a step pay off, by what was measured?

`DraftLength` climbs: it keeps to one number of drafts, now and then tries a neighbour for a few
steps, and moves there only if that gave clearly more tokens a second; a neighbour that disappointed
is tried again later and later. Acceptance and step times both are in that one figure. No drafts is
everyone's neighbour: speculation turns itself off where it does not pay, and on again.
Knows times and counts; no tensors, no requests.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

TRIAL_STEPS = 8
_FIRST_WAIT = 32
_LONGEST_WAIT = 1024
# A neighbour must be this much faster, so that noise does not move us to and fro.
MARGIN = 1.05
# Of a mean that forgets: about the last 16 steps count.
_SHARE = 1 / 16


@dataclass(eq=False)
class _Climber:
    """The choice for batches of about one size. Rates are tokens a request and second."""

    now: int
    most: int
    rate: float = 0.0
    steps: int = 0
    trial: int | None = None
    trial_steps: int = 0
    trial_tokens: float = 0.0
    trial_seconds: float = 0.0
    waits: dict[int, int] = field(default_factory=lambda: defaultdict(lambda: _FIRST_WAIT))
    due: dict[int, int] = field(default_factory=dict)
    clock: int = 0

    @property
    def drafts(self) -> int:
        return self.now if self.trial is None else self.trial

    def note(self, drafts: int, tokens: float, seconds: float) -> None:
        """One step of `drafts` drafts gave `tokens` tokens a request."""
        if drafts != self.drafts or seconds <= 0:
            return
        self.clock += 1
        if self.trial is not None:
            self._note_trial(tokens, seconds)
            return
        self.steps += 1
        # The plain mean first, so that the first step does not weigh for long.
        share = max(_SHARE, 1 / self.steps)
        self.rate += share * (tokens / seconds - self.rate)
        if self.steps >= TRIAL_STEPS:
            self._maybe_try()

    def _note_trial(self, tokens: float, seconds: float) -> None:
        self.trial_steps += 1
        # The first step of a trial pays for what waited: it does not count.
        if self.trial_steps > 1:
            self.trial_tokens += tokens
            self.trial_seconds += seconds
        if self.trial_steps <= TRIAL_STEPS:
            return
        tried, rate = self.trial, self.trial_tokens / self.trial_seconds
        assert tried is not None, "a trial is under way"
        self.trial = None
        if rate > MARGIN * self.rate:
            self.now, self.rate, self.steps = tried, rate, 1
            self.waits.clear()
            self.due.clear()
        else:
            self.due[tried] = self.clock + self.waits[tried]
            self.waits[tried] = min(2 * self.waits[tried], _LONGEST_WAIT)

    def _maybe_try(self) -> None:
        # None at all is always worth a look: between it and one there may be a valley.
        for drafts in (self.now + 1, self.now - 1, 0):
            sensible = 0 <= drafts <= self.most and drafts != self.now
            if sensible and self.clock >= self.due.get(drafts, 0):
                self.trial = drafts
                self.trial_steps, self.trial_tokens, self.trial_seconds = 0, 0.0, 0.0
                return


class DraftLength:
    """The number of drafts of the next step; each doubling of the batch is decided on its own."""

    def __init__(self, most: int, *, adapts: bool) -> None:
        """At most `most` drafts; always that many unless it `adapts`."""
        self.most = most
        self.adapts = adapts
        self._climbers: dict[int, _Climber] = {}

    def drafts(self, batch_size: int) -> int:
        """Drafts for each of about `batch_size` decoding requests."""
        return self._climber(batch_size).drafts if self.adapts else self.most

    def note(self, batch_size: int, drafts: int, tokens: int, seconds: float) -> None:
        """A step of decodes alone, all with `drafts` drafts, gave so many tokens in so long."""
        if self.adapts and batch_size:
            self._climber(batch_size).note(drafts, tokens / batch_size, seconds)

    def _climber(self, batch_size: int) -> _Climber:
        size = batch_size.bit_length()
        if size not in self._climbers:
            self._climbers[size] = _Climber(now=min(1, self.most), most=self.most)
        return self._climbers[size]
