"""What came of a chain of runs: a line a link, of the numbers that each stage is judged by."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hpc_rlhf.observe.metrics import read_metrics
from hpc_rlhf.observe.table import REWARD
from hpc_rlhf.run_dir import RunDir

LAST_STEPS = 5  # of the online stage, whose mean is its end
_JUDGED_BY = (  # the first that there is
    ("eval/pair/accuracy", "held-out accuracy"),
    ("pair/accuracy", "accuracy"),
    ("eval/loss", "held-out loss"),
    ("loss", "loss"),
)


@dataclass(frozen=True)
class RewardGain:
    """By how much online training raised the reward that it maximised."""

    before: float  # mean over the samples of the policy that it began with
    after: float  # mean of the last steps
    std: float  # of one sample's reward, under the policy that it began with
    kl: float | None = None  # nats a completion in the last steps, from the reference

    @property
    def in_std(self) -> float:
        """The gain in standard deviations: scores of a reward model have no unit of their own."""
        return (self.after - self.before) / self.std if self.std else math.nan

    def __str__(self) -> str:
        text = (
            f"mean reward {self.before:.3f} -> {self.after:.3f}, {self.in_std:+.2f} standard "
            f"deviations ({self.std:.3f}) of its first policy's"
        )
        return text if self.kl is None else f"{text}; KL {self.kl:.2f} nats a completion"


def reward_gain(records: Sequence[Mapping[str, Any]], untrained: int = 0) -> RewardGain | None:
    """The gain of an online run, None without rewards.

    Args:
        records: metrics by step, in order.
        untrained: steps that leave the policy as it is. The one after them has samples of the first
            policy still: a step learns after it has sampled.
    """
    having = [record for record in records if record.get(REWARD) is not None]
    if not having:
        return None
    first, last = having[: untrained + 1], having[-LAST_STEPS:]
    before = _mean(first, REWARD)
    squares = sum(r["reward/std"] ** 2 + r[REWARD] ** 2 for r in first) / len(first)
    kl = _mean(last, "kl_sequence") if all("kl_sequence" in record for record in last) else None
    return RewardGain(before, _mean(last, REWARD), math.sqrt(max(0.0, squares - before**2)), kl)


def outcome(runs: Mapping[str, RunDir], untrained: Mapping[str, int]) -> Table:
    """A line for each run that has recorded steps.

    Args:
        runs: by the names of their links.
        untrained: see :func:`reward_gain`.
    """
    table = Table(title="the chain", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, run in runs.items():
        text = describe(read_metrics(run), untrained.get(name, 0))
        if text is not None:
            table.add_row(name, text)
    return table


def describe(records: Sequence[Mapping[str, Any]], untrained: int = 0) -> str | None:
    """What one run is judged by, None before there is anything.

    Args:
        untrained: see :func:`reward_gain`.
    """
    gain = reward_gain(records, untrained)
    if gain is not None:
        return str(gain)
    for name, what in _JUDGED_BY:
        values = [record[name] for record in records if record.get(name) is not None]
        if values:
            return f"{what} {values[0]:.3f} -> {values[-1]:.3f}"
    return None


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(record[name] for record in records) / len(records)
