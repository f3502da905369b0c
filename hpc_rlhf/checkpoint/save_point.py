"""What a checkpoint is of: a finished step, or some mini-batches of the step after it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NAME = re.compile(r"step_(\d+)(?:\+(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class SavePoint:
    """A place in a run, in the order of the run.

    Example:
        >>> SavePoint(11).name, SavePoint(11, 3).name
        ('step_11', 'step_11+3')
        >>> SavePoint(11) < SavePoint(11, 3) < SavePoint(12)
        True
    """

    step: int  # finished
    mini_batches: int = 0  # of the step after it, that were learned from

    @property
    def name(self) -> str:
        """Name of the checkpoint's directory."""
        return f"step_{self}"

    def __str__(self) -> str:
        return f"{self.step}+{self.mini_batches}" if self.mini_batches else str(self.step)

    @classmethod
    def parse(cls, name: str) -> "SavePoint | None":
        """The save point that a directory's ``name`` stands for, None if it is no checkpoint's."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2] or 0)) if match else None


def outlived(points: Sequence[SavePoint], keep: int, keep_every_steps: int) -> list[SavePoint]:
    """Those of ``points`` that need not be kept.

    Args:
        keep: how many of the newest ones are; 0: all.
        keep_every_steps: finished steps that are multiples of it are, too; 0: no others.

    Example:
        >>> outlived([SavePoint(7), SavePoint(10), SavePoint(10, 2), SavePoint(12)], 1, 5)
        [SavePoint(step=10, mini_batches=2), SavePoint(step=7, mini_batches=0)]
    """
    older = sorted(points, reverse=True)[keep:] if keep else []

    def is_kept(point: SavePoint) -> bool:
        return keep_every_steps > 0 and not point.mini_batches and not point.step % keep_every_steps

    return [point for point in older if not is_kept(point)]


BEGINNING = SavePoint(0)
"""Of a run that has done nothing yet; there is no checkpoint of it."""
