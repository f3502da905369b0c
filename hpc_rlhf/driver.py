"""What every run does with its steps: take them, record them, save, stop when asked to, complete."""

from collections.abc import Callable, Iterator
from typing import Protocol

from hpc_rlhf.cluster.stopping import StopRequested
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.observe.timeline import StepTimes, Timeline
from hpc_rlhf.types import Phase


class Run(Protocol):
    """A run that can be driven. Every method is collective over the learner."""

    completed: int
    """Steps that the weights have learned from."""

    def remaining(self) -> Iterator[int]:
        """The steps to do, counted from 1."""
        ...

    def record(self, times: StepTimes) -> None:
        """Append the step's metrics, once per step whatever was resumed."""
        ...

    def checkpoint_due(self, step: int) -> bool:
        """Whether to save after ``step``."""
        ...

    def save(self, *, wait: bool) -> None:
        """Save where the run is; ``wait`` until it is durable."""
        ...

    def complete(self) -> None:
        """Export the result and mark the run complete."""
        ...


def drive(run: Run, timeline: Timeline, take: Callable[[int], None]) -> ExitCode:
    """Take every step that is left, until the last one or until asked to stop.

    Collective over the learner: every rank calls it and enters every phase.

    Args:
        take: does one step, in its phases. StopRequested: what it has of the step is kept.

    Returns:
        DONE after the last step, INTERRUPTED when a stop was asked for: the state is saved.
    """
    try:
        for step in run.remaining():
            take(step)
            # Before the checkpoint: a step that is never done again must not lack its record. So
            # the seconds of a checkpoint are in the record of the step after it.
            run.record(timeline.finish(step))
            if run.checkpoint_due(step):
                with timeline.phase(step, Phase.CHECKPOINT):
                    run.save(wait=False)
    except StopRequested:
        with timeline.phase(run.completed, Phase.CHECKPOINT):
            run.save(wait=True)
        return ExitCode.INTERRUPTED
    run.complete()
    return ExitCode.DONE
