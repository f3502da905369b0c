"""The sampler component: a module of its own, since a server needs nothing of the learner."""

from hpc_rlhf.cluster.world import World
from hpc_rlhf.config import Config
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.launch.job_plan import JobPlan
from hpc_rlhf.observe.startup import StartUp
from hpc_rlhf.rollout.server import serve
from hpc_rlhf.run_dir import Attempt


def run_sampler(
    config: Config,
    plan: JobPlan,
    attempt: Attempt,
    world: World,
    replica: int,
    startup: StartUp,
) -> ExitCode:
    """One vLLM server, until it is told to stop."""
    serve(
        attempt=attempt,
        token_file=plan.run.token_file,
        replica=replica,
        world=world,
        address=world.address(config.cluster.network_interface),
        model=config.model,
        sampler=config.sampler,
        cache=plan.run.engine_cache(replica),
        startup=startup,
    )
    return ExitCode.DONE
