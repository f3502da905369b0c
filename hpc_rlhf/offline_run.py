"""An offline run's components bound together: what the loop calls, phase by phase.

Every method is collective over the learner. What only the coordinator (learner rank 0) holds is in
:class:`OfflineCoordinator`; the other ranks have None there.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_rlhf.checkpoint.save_point import SavePoint
from hpc_rlhf.checkpoint.saving import Saving
from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.cluster.stopping import SavePoints, StopRequested
from hpc_rlhf.cluster.walltime import WalltimeGuard
from hpc_rlhf.config import OfflineConfig, RunConfig
from hpc_rlhf.data.order import examples_of_step
from hpc_rlhf.data.tokens import TokenDataset
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.fs import publish_json
from hpc_rlhf.learner.objectives import Objective
from hpc_rlhf.learner.trainer import NotFinite, Trainer
from hpc_rlhf.observe.metrics import MetricsWriter
from hpc_rlhf.observe.timeline import StepTimes
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Example, Phase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExampleSet:
    """A tokenised data set, with the reference's log-probs where the objective compares with them."""

    dataset: TokenDataset
    ref_log_probs: NDArray[np.float64] | None = None  # [N, sequences of an example]

    def __len__(self) -> int:
        return len(self.dataset)

    def examples(self, indices: NDArray[np.int64] | range) -> list[Example]:
        found = self.dataset.examples(indices)
        if self.ref_log_probs is None:
            return found
        return [
            replace(example, ref_log_probs=tuple(self.ref_log_probs[i]))
            for i, example in zip(indices, found, strict=True)
        ]


@dataclass
class OfflineCoordinator:
    """What learner rank 0 holds beside its share of the model."""

    metrics: MetricsWriter
    walltime: WalltimeGuard


@dataclass
class OfflineRun:
    """State and components of one attempt at an offline run."""

    directory: RunDir
    attempt: int
    config: RunConfig
    offline: OfflineConfig
    objective: Objective
    trainer: Trainer
    train_set: ExampleSet
    order_seed: int | None  # None: the order of the file
    held_out: ExampleSet | None
    saving: Saving
    control: ControlGroup
    save_points: SavePoints
    export: Callable[[], dict[str, str]]  # writes the result; the completion marker's entries
    coordinator: OfflineCoordinator | None
    completed: int = 0  # steps that the weights have learned from
    recorded: int = 0  # steps with a record; the next one may have its evaluation to come
    skipped: int = 0  # steps whose loss or gradient was not finite
    stats: dict[str, float] = field(default_factory=dict)  # of the step that has no record yet
    startup: dict[str, float] = field(default_factory=dict)  # for the first record

    def remaining(self) -> Iterator[int]:
        """The steps without a record, counted from 1."""
        yield from range(self.recorded + 1, self.config.steps + 1)

    def resume(self) -> None:
        """Load the newest whole checkpoint, if there is one."""
        found = self.saving.resume(self.trainer)
        if found is not None:
            point, state = found
            self.completed = point.step
            self.recorded, self.skipped = state["recorded"], state["skipped"]
            self.stats = state["stats"]
        if self.coordinator is not None:
            self.coordinator.metrics.truncate(self.recorded)

    def update(self, step: int) -> None:
        """Learn from the examples of ``step``, or skip it when its loss is not finite.

        Raises:
            StopRequested: the last step is finished.
            ComponentError: too many steps were skipped; names the samples of the last one.
        """
        self._stop_before(Phase.TRAIN)
        indices = examples_of_step(
            len(self.train_set), self.offline.batch_size, step, seed=self.order_seed
        )
        examples = self.train_set.examples(indices)
        try:
            self.stats = self.trainer.fit(self.objective, examples)
        except NotFinite as error:
            self.skipped += 1
            logger.warning("step %d skipped: %s", step, error)
            if self.skipped > self.offline.max_skipped_steps:
                raise ComponentError(
                    f"{self.skipped} steps were skipped, more than offline.max_skipped_steps="
                    f"{self.offline.max_skipped_steps}; the last one, step {step}: {error}"
                ) from error
            self.stats = {"loss": math.nan}
        self.stats |= {
            "epoch": step * self.offline.batch_size / len(self.train_set),
            "train/skipped": float("grad_norm" not in self.stats),
        }
        self.completed = step

    def evaluation_due(self, step: int) -> bool:
        due = step % self.offline.eval_every_steps == 0 or step == self.config.steps
        return self.held_out is not None and due

    def evaluate(self) -> None:
        """Measure the objective on what was held out.

        Raises:
            StopRequested: the step's record is to come, after the resume.
        """
        assert self.held_out is not None
        count = min(len(self.held_out), self.offline.eval_examples)
        found = self.trainer.evaluate(
            self.objective, self.held_out.examples(range(count)), pause=self._stop_before
        )
        self.stats |= {f"eval/{name}": value for name, value in found.items()}

    def record(self, times: StepTimes) -> None:
        """Append the step's metrics, once per step whatever was resumed."""
        self.recorded = self.completed
        if self.coordinator is None:
            return
        self.stats |= self.saving.cost()
        record: dict[str, Any] = {**self.startup, **self.stats, **times.as_metrics()}
        self.startup = {}
        if Phase.TRAIN in times.seconds and "tokens" in self.stats:
            speed = self.stats["tokens"] / times.seconds[Phase.TRAIN]
            record["train/tokens_per_second"] = speed
        self.coordinator.metrics.write(self.completed, self.attempt, record)
        self.coordinator.walltime.observe(record)

    def checkpoint_due(self, step: int) -> bool:
        return self.saving.due(step)

    def save(self, *, wait: bool) -> None:
        """Save the last finished step, with its statistics if they have no record yet."""
        state = {
            "recorded": self.recorded,
            "skipped": self.skipped,
            "stats": self.stats if self.recorded < self.completed else {},
        }
        self.saving.save(SavePoint(self.completed), self.trainer, state, wait=wait)

    def complete(self) -> None:
        """Export the model as a Hugging Face directory and mark the run complete."""
        exported = self.export()
        self.saving.manager.wait()
        if self.control.is_coordinator:
            publish_json(self.directory.complete, {"step": self.completed, **exported})

    def close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.metrics.close()
        self.saving.manager.close()

    def _stop_before(self, *phases: Phase) -> None:
        if self.save_points.stop_before(*phases):
            raise StopRequested
