"""What a checkpoint is of: a finished step, or some mini-batches of the step after it."""

import re
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


BEGINNING = SavePoint(0)
"""Of a run that has done nothing yet; there is no checkpoint of it."""
