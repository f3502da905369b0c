"""The tax of an attempt: the seconds from its start to its first sampled token, part by part.

An offline stage samples nothing: its start is over when the first step begins.

Learner and samplers start at the same time. What counts is the coordinator's way through it: its
parts follow upon each other and add up to the whole, and one of them is the wait for the samplers,
whose own parts are beside it.
"""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpc_rlhf.fs import publish_json
from hpc_rlhf.observe.notices import tell
from hpc_rlhf.run_dir import Attempt

LAUNCH = "launch"  # from the attempt's start to the first line of this process: srun, Python
IMPORTS = "imports"
GROUPS = "groups"
DATA = "data"  # tokenizer and prompts
WARM_UP = "warm-up"
DIGESTS = "digests"  # of frozen models
LOAD = "load"  # models and optimizer
CHECKPOINT = "checkpoint"
SAMPLERS = "samplers"  # the learner is ready and waits for them
SYNC = "sync"
FIRST_TOKEN = "first token"
ENGINE = "engine"
SERVER = "server"

_SHOWN_FROM_S = 0.05


@contextmanager
def importing() -> Iterator[None]:
    """Import in a ``with`` block: without collecting garbage, a fifth of the time, which finds none."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # what was imported stays: no later collection need look at it
        gc.enable()


class StartUp:
    """The parts of one process's start, one after the other, until :meth:`end`.

    Example:
        >>> startup = StartUp(attempt_started)
        >>> startup.begin(GROUPS)
    """

    def __init__(self, attempt_began: float) -> None:
        """Begin with ``launch``, which ends now, and ``imports``.

        Args:
            attempt_began: Unix time, by the clock of the supervisor's node.
        """
        now = time.time()
        self._began = min(attempt_began, now)  # clocks of two nodes may differ
        # one clock from here on, and times of other processes moved onto it
        self._unix_of_monotonic = now - time.monotonic()
        self._marks: list[tuple[str, float]] = [(LAUNCH, self._began), (IMPORTS, now)]
        self._ended: float | None = None

    @property
    def ended(self) -> bool:
        return self._ended is not None

    @property
    def part(self) -> str:
        """The part under way."""
        return self._marks[-1][0]

    def begin(self, part: str) -> None:
        """End the part under way and begin ``part``; nothing after the end."""
        if not self.ended and part != self.part:
            self._marks.append((part, self._now()))

    def end(self, at: float | None = None) -> None:
        """The start is over, at Unix time ``at``, which may be a while ago; default: now.

        Parts that began later are forgotten. The first call counts.
        """
        if not self.ended:
            self._ended = max(self._now() if at is None else at, self._began)

    def seconds(self) -> dict[str, float]:
        """Seconds by part in the order of their beginning; the last one's until now or the end."""
        end = self._now() if self._ended is None else self._ended
        found: dict[str, float] = {}
        ends = [*(began for _, began in self._marks[1:]), end]
        for (part, began), until in zip(self._marks, ends, strict=True):
            if began <= end:
                found[part] = found.get(part, 0.0) + min(until, end) - began
        return found

    def _now(self) -> float:
        return self._unix_of_monotonic + time.monotonic()


@dataclass(frozen=True)
class StartUpReport:
    """What ``ATTEMPT/startup.json`` holds."""

    seconds: float
    parts: Mapping[str, float]  # the coordinator's; they add up to ``seconds``
    samplers: Mapping[str, Mapping[str, float]]  # replica -> parts until it served

    def to_json(self) -> dict[str, Any]:
        rounded = {name: _rounded(parts) for name, parts in self.samplers.items()}
        return {
            "seconds": round(self.seconds, 3),
            "parts": _rounded(self.parts),
            "samplers": rounded,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "StartUpReport":
        return cls(**value)

    def as_metrics(self) -> dict[str, float]:
        """``startup/seconds``, and ``startup/<part>`` of the coordinator."""
        named = {f"startup/{part.replace(' ', '_')}": s for part, s in self.parts.items()}
        return {"startup/seconds": self.seconds, **named}

    def __str__(self) -> str:
        """``start-up 21.4 s: launch 0.3 | imports 5.2 | ... (beside: sampler-0 in 14.0: ...)``."""
        text = f"start-up {self.seconds:.1f} s: {_listed(self.parts)}"
        if not self.samplers:
            return text
        name, slowest = max(self.samplers.items(), key=lambda item: sum(item[1].values()))
        which = f"sampler-{name}" + (", the slowest," if len(self.samplers) > 1 else "")
        return f"{text} (beside: {which} in {sum(slowest.values()):.1f} s: {_listed(slowest)})"


def publish_report(
    attempt: Attempt, startup: StartUp, samplers: Mapping[str, Mapping[str, float]]
) -> StartUpReport:
    """Say and publish how the attempt began; the coordinator does, when it has.

    Args:
        samplers: replica -> seconds of its start by part.
    """
    parts = startup.seconds()
    report = StartUpReport(sum(parts.values()), parts, samplers)
    publish_json(attempt.startup, report.to_json())
    tell(attempt, str(report))
    return report


def _listed(parts: Mapping[str, float]) -> str:
    return " | ".join(f"{part} {s:.1f}" for part, s in parts.items() if s >= _SHOWN_FROM_S)


def _rounded(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: round(seconds, 3) for part, seconds in parts.items()}
