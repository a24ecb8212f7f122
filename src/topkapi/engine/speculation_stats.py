"""What has speculation done so far? Plain counters, kept by the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_DRAFTS = 4


@dataclass
class SpeculationStats:
    """What speculation has done since the engine was made.

    Attributes:
        num_rounds: forward passes that verified drafts, counted once a request.
        num_drafted, num_accepted: drafts, and those that were right.
        accepted_at: how many rounds accepted the first, the second, ... draft.
        num_steps: steps by how many drafts each request had; 0 are steps without.
    """

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    num_steps: list[int] = field(default_factory=lambda: [0] * (MAX_DRAFTS + 1))

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verifying pass gave a request on average; None before the first."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else None

    def note(self, num_drafts: int, accepted: Sequence[int]) -> None:
        self.num_steps[num_drafts] += 1
        self.num_rounds += len(accepted)
        self.num_drafted += num_drafts * len(accepted)
        self.num_accepted += sum(accepted)
        for place in range(num_drafts):
            self.accepted_at[place] += sum(count > place for count in accepted)
