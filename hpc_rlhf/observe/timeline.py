"""Where the wall clock goes: every second of a step belongs to one phase."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpc_rlhf.observe.startup import FIRST_TOKEN, StartUp
from hpc_rlhf.run_dir import Attempt
from hpc_rlhf.types import Phase


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step by phase.

    ``total`` is from the step's first phase to its end, so that it holds what is between phases,
    too. The first step of an attempt also names the SETUP before it, which is not in ``total``.
    """

    step: int
    seconds: dict[Phase, float]
    total: float

    @property
    def trainer_idle_fraction(self) -> float:
        """Share of the step in which the learner's devices wait for samples or for a transfer."""
        idle = self.seconds.get(Phase.ROLLOUT, 0.0) + self.seconds.get(Phase.SYNC, 0.0)
        return idle / self.total if self.total else 0.0

    def as_metrics(self) -> dict[str, float]:
        """``time/<phase>`` in seconds, ``time/step``, ``trainer/idle_fraction``."""
        return {
            **{f"time/{phase}": seconds for phase, seconds in self.seconds.items()},
            "time/step": self.total,
            "trainer/idle_fraction": self.trainer_idle_fraction,
        }


class Timeline:
    """The phase that this process is in, and the seconds of the phases before it.

    Example:
        >>> timeline = Timeline()
        >>> with timeline.phase(7, Phase.TRAIN):
        ...     timeline.current
        (7, <Phase.TRAIN: 'train'>)
    """

    def __init__(self, attempt: Attempt | None = None, startup: StartUp | None = None) -> None:
        """Args:
        attempt: publish every change of phase to its ``progress.json``; one process does.
        startup: of this process; its parts after set-up are phases.
        """
        self._progress = attempt.progress if attempt else None
        self.startup = startup or StartUp(time.time())
        self._seconds: dict[Phase, float] = defaultdict(float)
        self._step_began: float | None = None
        self.current: tuple[int, Phase] = (0, Phase.SETUP)

    @contextmanager
    def phase(self, step: int, phase: Phase) -> Iterator[None]:
        """Spend the block's time on ``phase`` of ``step``.

        After an exception :attr:`current` still names the phase that it came from.
        """
        self.current = (step, phase)
        if phase is not Phase.SETUP:
            self.startup.begin(FIRST_TOKEN if phase is Phase.ROLLOUT else phase.value)
        self._publish()
        began = time.monotonic()
        if self._step_began is None and phase is not Phase.SETUP:
            self._step_began = began
        yield
        self._seconds[phase] += time.monotonic() - began

    def part(self, part: str) -> None:
        """Begin a part of SETUP; see :mod:`hpc_rlhf.observe.startup`."""
        self.startup.begin(part)
        self._publish()

    def finish(self, step: int) -> StepTimes:
        """Close the books of ``step``, which ends now; the next one begins with its first phase."""
        began = time.monotonic() if self._step_began is None else self._step_began
        times = StepTimes(step, dict(self._seconds), time.monotonic() - began)
        self._seconds.clear()
        self._step_began = None
        return times

    def _publish(self) -> None:
        if self._progress is None:
            return
        step, phase = self.current
        # Not fsynced: it is for people and the supervisor while this attempt lives, and a phase of
        # milliseconds must not wait for a disk. Renamed, so that it is never half read.
        temporary = self._progress.with_name(f".{self._progress.name}.tmp")
        record: dict[str, Any] = {"step": step, "phase": phase, "time": time.time()}
        if not self.startup.ended:
            record |= {"part": self.startup.part, "startup": self.startup.seconds()}
        temporary.write_text(json.dumps(record))
        os.replace(temporary, self._progress)
