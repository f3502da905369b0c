"""How long a run still takes, from the steps that it has done."""

from collections.abc import Mapping, Sequence
from typing import Any

_STEPS = 20  # the newest ones, whose mean is taken: some of them save, most do not


def seconds_a_step(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean of the newest steps, None while there is none."""
    times = [record["time/step"] for record in records[-_STEPS:] if record.get("time/step")]
    return sum(times) / len(times) if times else None


def seconds_left(records: Sequence[Mapping[str, Any]], steps: int) -> float | None:
    """Of a run of ``steps`` that goes on as it did; None while there is nothing to go by."""
    pace = seconds_a_step(records)
    return None if pace is None else max(0, steps - records[-1]["step"]) * pace


def duration(seconds: float) -> str:
    """In two units at most: ``8 s``, ``3 min``, ``2 h 05 min``, ``3 d 4 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"
