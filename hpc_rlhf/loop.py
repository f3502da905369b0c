"""The loops of training: a step of each kind of run, phase by phase."""

from typing import TYPE_CHECKING

from hpc_rlhf.driver import drive
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.observe.timeline import Timeline
from hpc_rlhf.types import Phase

if TYPE_CHECKING:
    from hpc_rlhf.offline_run import OfflineRun
    from hpc_rlhf.online_run import OnlineRun


def train(run: "OnlineRun", timeline: Timeline) -> ExitCode:
    """Online training: sample, score, learn, publish. See :func:`~hpc_rlhf.driver.drive`.

    After a stop in the middle of a step, its samples are on disk.
    """

    def take(step: int) -> None:
        batch = run.begin(step)
        while batch.wanted:  # more than once with dynamic sampling
            with timeline.phase(step, Phase.ROLLOUT):
                batch = run.collect(batch)
            with timeline.phase(step, Phase.SCORE):
                batch = run.score(batch)
        with timeline.phase(step, Phase.SCORE):
            experience = run.experience(batch)
        with timeline.phase(step, Phase.TRAIN):
            run.update(experience)
        with timeline.phase(step, Phase.SYNC):
            run.publish()

    with timeline.phase(0, Phase.SYNC):
        run.publish()  # nothing is sampled before the samplers hold this state's weights
    timeline.finish(0)
    return drive(run, timeline, take)


def fit(run: "OfflineRun", timeline: Timeline) -> ExitCode:
    """Offline training (SFT, reward model, DPO): learn, look at what was held out."""

    def take(step: int) -> None:
        if run.completed < step:  # else it was stopped before its evaluation
            with timeline.phase(step, Phase.TRAIN):
                run.update(step)
        if run.evaluation_due(step):
            with timeline.phase(step, Phase.SCORE):
                run.evaluate()

    return drive(run, timeline, take)
