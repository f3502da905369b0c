"""The outer loop of online training: sample, score, learn, publish, save."""

from hpc_rlhf.cluster.stopping import StopRequested
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.observe.timeline import Timeline
from hpc_rlhf.online_run import OnlineRun
from hpc_rlhf.types import Phase


def train(run: OnlineRun, timeline: Timeline) -> ExitCode:
    """Train until the last step or until asked to stop.

    Collective over the learner: every rank calls it and enters every phase.

    Returns:
        DONE after the last step, INTERRUPTED when a stop was asked for: the state is saved, and the
        samples of a step under way are on disk.
    """
    with timeline.phase(0, Phase.SYNC):
        run.publish()  # nothing is sampled before the samplers hold this state's weights
    timeline.finish(0)
    try:
        for step in run.remaining():
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
