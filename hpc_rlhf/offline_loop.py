"""The outer loop of offline training: learn, look at what was held out, save."""

from hpc_rlhf.cluster.stopping import StopRequested
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.observe.timeline import Timeline
from hpc_rlhf.offline_run import OfflineRun
from hpc_rlhf.types import Phase


def fit(run: OfflineRun, timeline: Timeline) -> ExitCode:
    """Learn until the last step or until asked to stop; SFT, reward model and DPO alike.

    Collective over the learner: every rank calls it and enters every phase.

    Returns:
        DONE after the last step, INTERRUPTED when a stop was asked for: the state is saved.
    """
    try:
        for step in run.remaining():
            if run.completed < step:  # else it was stopped before its evaluation
                with timeline.phase(step, Phase.TRAIN):
                    run.update(step)
            if run.evaluation_due(step):
                with timeline.phase(step, Phase.SCORE):
                    run.evaluate()
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
