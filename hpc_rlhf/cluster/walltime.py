"""The end of the allocation, and whether what comes next still fits before it. Pure."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rlhf.types import Phase

MARGIN_S = 30.0
"""Left for ending the steps and requeueing, and for clocks that disagree."""


@dataclass(frozen=True)
class Deadline:
    """When the allocation ends; never, where there is no limit."""

    end: float | None = None  # Unix time
    margin_s: float = MARGIN_S
    now: Callable[[], float] = time.time

    @property
    def left_s(self) -> float:
        """Seconds that can still be used; negative after the deadline, infinite without one."""
        return math.inf if self.end is None else self.end - self.margin_s - self.now()

    def fits(self, seconds: float) -> bool:
        return seconds <= self.left_s


def by_this_clock(end: float, *, job_start: float | None, script_start: float) -> float:
    """The end of an allocation by the clock of this node, if that is behind the one Slurm goes by.

    No script starts before its job: what it seems to, the clocks differ by. A late start says nothing
    of them, since nodes boot and prologs run.

    Args:
        end: Unix time, by Slurm's clock.
        job_start: as ``end``; None where Slurm does not say.
        script_start: when the job script's process began, by this node's clock.
    """
    return end if job_start is None else end + min(0.0, script_start - job_start)


class DurationEstimate:
    """How long the next one of a kind will take: the 95th percentile of the past ones.

    The nearest-rank percentile, so that it is the longest one while there are fewer than 20. Without
    any, nothing is known and 0 is said: what was never measured is begun, not refused for ever.
    """

    def __init__(self, seconds: Iterable[float] = (), *, window: int = 100) -> None:
        """Args:
        window: of the newest ones that count: responses grow longer as a run goes on.
        """
        self._window = window
        self._seconds = list(seconds)[-window:]

    def add(self, seconds: float) -> None:
        self._seconds = [*self._seconds, seconds][-self._window :]

    @property
    def p95(self) -> float:
        if not self._seconds:
            return 0.0
        rank = math.ceil(0.95 * len(self._seconds))
        return sorted(self._seconds)[rank - 1]


class WalltimeGuard:
    """Whether phases, with a checkpoint after them, would end before the allocation does.

    One process (the coordinator) asks it and tells the others: they would not agree on the time.

    Example:
        >>> guard = WalltimeGuard(Deadline(end), read_metrics(run))
        >>> if control.any(guard.out_of_time(Phase.TRAIN, Phase.SYNC)):
        ...     raise StopRequested  # what was sampled is on disk, the next attempt learns from it
    """

    def __init__(self, deadline: Deadline, records: Iterable[Mapping[str, Any]] = ()) -> None:
        """Args:
        records: metrics of the steps so far, of earlier attempts too: the first step of an
            attempt is judged by them.
        """
        self._deadline = deadline
        self._phases: dict[str, DurationEstimate] = defaultdict(DurationEstimate)
        for record in records:
            self.observe(record)

    def observe(self, record: Mapping[str, Any]) -> None:
        """Learn from the metrics of a finished step: ``time/<phase>`` in seconds, and
        ``checkpoint/seconds`` of a save that was written while training went on."""
        for name, seconds in record.items():
            if seconds is None:
                continue
            if name.startswith("time/"):
                self._phases[name.removeprefix("time/")].add(float(seconds))
            elif name == "checkpoint/seconds":
                self._phases[Phase.CHECKPOINT].add(float(seconds))

    def needed_s(self, *phases: str) -> float:
        """Seconds that the phases and a checkpoint are expected to take at most."""
        return sum(self._phases[phase].p95 for phase in (*phases, Phase.CHECKPOINT))

    def out_of_time(self, *phases: str) -> bool:
        """Whether it is too late to begin ``phases``; of none, to do anything but save."""
        return not self._deadline.fits(self.needed_s(*phases))

    def why(self, *phases: str) -> str:
        """The reason to stop, for the log."""
        return (
            f"walltime: {max(self._deadline.left_s, 0):.0f} s are left, "
            f"{' + '.join((*phases, Phase.CHECKPOINT))} take up to {self.needed_s(*phases):.0f} s"
        )
