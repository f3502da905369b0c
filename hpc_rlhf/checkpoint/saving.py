"""When a run is saved, and where it goes on: the same for every kind of run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rlhf.checkpoint.manager import Checkpointable, CheckpointManager
from hpc_rlhf.checkpoint.save_point import BEGINNING, SavePoint
from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.config import CheckpointConfig


@dataclass
class Saving:
    """The checkpoints of one attempt. Every method is collective over the learner."""

    manager: CheckpointManager
    config: CheckpointConfig
    control: ControlGroup
    last_step: int  # of the run, which is saved whatever its number
    tell: Callable[[str], None]  # the person at the terminal; called on the coordinator
    saved: SavePoint = BEGINNING

    def resume(
        self, trainer: Checkpointable, *, reject: Callable[[SavePoint], str | None] | None = None
    ) -> tuple[SavePoint, dict[str, Any]] | None:
        """Load the newest whole checkpoint into ``trainer``.

        Args:
            reject: see :meth:`~hpc_rlhf.checkpoint.manager.CheckpointManager.latest`.

        Returns:
            Its save point and what was saved with it; None if there is none to go on from.
        """
        point = self.manager.latest(verify=True, reject=reject, tell=self.tell)
        state = self.manager.load(point, trainer) if point is not None else {}
        if self.control.is_coordinator:
            self.tell(f"resumes from {self.manager.path(point)}" if point else "begins with step 1")
        if point is None:
            return None
        self.saved = point
        return point, state

    def due(self, step: int) -> bool:
        """Whether to save after ``step``, or to hear now that the save under way has failed."""
        due = step % self.config.every_steps == 0 or step == self.last_step
        return due or self.control.any(self.manager.failed)

    def save(
        self, point: SavePoint, trainer: Checkpointable, state: Mapping[str, Any], *, wait: bool
    ) -> None:
        """Save ``point``, unless that is saved or is the beginning.

        Args:
            state: see :meth:`~hpc_rlhf.checkpoint.manager.CheckpointManager.save`.
            wait: until it is durable; else it may be written while training goes on.
        """
        if point in (BEGINNING, self.saved):
            if wait:
                self.manager.wait()
            return
        self.manager.save(point, trainer, state, wait=wait or not self.config.asynchronous)
        self.saved = point

    def cost(self) -> dict[str, float]:
        """Metrics of the newest save, once. Not collective."""
        cost = self.manager.take_cost()
        return cost.as_metrics() if cost is not None else {}
