"""Signals set a flag; the work happens at the next save point."""

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# SIGTERM: preemption and scancel. USR2: what --signal asks for before the walltime. USR1 is left
# alone, NCCL and some MPI libraries catch it.
DEFAULT_SIGNALS = ("TERM", "USR2")
# What a scheduler or a person may send to every process of a step, and means the learner.
REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """Whether this process was asked to stop, by what, and when.

    Example:
        >>> flag = StopFlag()
        >>> with flag.installed():
        ...     while not flag.requested:
        ...         train()
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []  # (signal name or reason, Unix time), in order

    @property
    def requested(self) -> bool:
        return bool(self.seen)

    @property
    def reason(self) -> str | None:
        """What asked first: "SIGTERM", "SIGUSR2", or the text given to :meth:`request`."""
        return self.seen[0][0] if self.seen else None

    def request(self, reason: str) -> None:
        """Ask for the stop from within (the walltime is near, a peer asked)."""
        self.seen.append((reason, time.time()))

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)

    def install(self, names: Iterable[str] = DEFAULT_SIGNALS) -> dict[signal.Signals, Any]:
        """Handle the named signals from now on; return the handlers they had.

        Only the main thread may do this (a rule of Python's). A handler runs between two bytecodes:
        a main thread that is blocked in a C call sees the flag when that call returns.

        Raises:
            ValueError: not the main thread, or no such signal.
        """
        numbers = [signal_number(name) for name in dict.fromkeys(names)]
        return {number: signal.signal(number, self._handle) for number in numbers}

    @contextmanager
    def installed(self, names: Iterable[str] = DEFAULT_SIGNALS) -> Iterator["StopFlag"]:
        """:meth:`install` for the time of a ``with`` block."""
        old = self.install(names)
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def signal_number(name: str) -> signal.Signals:
    """Return the signal called ``name``, with or without "SIG".

    Raises:
        ValueError: there is none.
    """
    try:
        return signal.Signals[f"SIG{name.removeprefix('SIG')}"]
    except KeyError:
        raise ValueError(f"no signal is called {name}") from None
