"""What every learner rank does first, whatever its stage: it joins the others, and identifies and loads models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from hpc_rlhf.checkpoint import frozen
from hpc_rlhf.checkpoint.manager import CheckpointManager
from hpc_rlhf.checkpoint.saving import Saving
from hpc_rlhf.cluster import device
from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.cluster.rendezvous import join_learner_world
from hpc_rlhf.cluster.signals import StopFlag
from hpc_rlhf.cluster.stopping import SavePoints
from hpc_rlhf.cluster.walltime import Deadline, WalltimeGuard
from hpc_rlhf.cluster.world import World
from hpc_rlhf.config import Config, ParallelConfig, Recompute
from hpc_rlhf.fs import read_json
from hpc_rlhf.launch.diagnosis import announce_stop
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import PolicyModel, build_model, load_hf
from hpc_rlhf.models.parallel import initialize_model_parallel
from hpc_rlhf.observe.metrics import read_metrics
from hpc_rlhf.observe.notices import tell
from hpc_rlhf.run_dir import Attempt, RunDir
from hpc_rlhf.runs import pin_models
from hpc_rlhf.types import FrozenRef


@dataclass(frozen=True)
class LearnerWorld:
    """This rank's connections to the others."""

    rank: int
    address: str
    store: TCPStore
    control: ControlGroup


def join(config: Config, attempt: Attempt, world: World) -> LearnerWorld:
    """Prepare the process, meet the other ranks, and make Megatron's groups. Collective."""
    learner = config.learner
    address = world.address(config.cluster.network_interface)
    device.prepare_process(
        world.local_rank, address=address, deterministic=config.run.deterministic
    )
    store = join_learner_world(
        attempt, world, address=address, timeout_s=config.sampler.start_timeout_s
    )
    dist.init_process_group(
        device.backend(),
        store=PrefixStore("world", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=learner.collective_timeout_s),
    )
    initialize_model_parallel(
        learner.parallel, seed=config.run.seed, timeout_s=learner.collective_timeout_s
    )
    control = ControlGroup(learner.collective_timeout_s)
    return LearnerWorld(world.rank, address, store, control)


def load_model(
    config: Config,
    directory: Path,
    recompute: Recompute,
    *,
    parallel: ParallelConfig | None = None,
    lm: bool = True,
    score: bool = False,
    new_head: Callable[[int], torch.Tensor] | None = None,
) -> PolicyModel:
    """The model of a Hugging Face directory, under these heads.

    Args:
        parallel: default: the learner's.
        lm: with the language-model head.
        score: with a score head.
        new_head: makes the weight of a score head that the directory does not have.
    """
    spec = HfModelSpec.from_directory(directory)
    model = build_model(
        spec.with_heads(lm=lm, score=score),
        parallel or config.learner.parallel,
        dtype=device.resolve_dtype(config.model.dtype),
        recompute=recompute,
    )
    load_hf(model, directory, new_head=new_head)
    return model


def pin_frozen(
    directories: Mapping[str, Path], run: RunDir, control: ControlGroup
) -> dict[str, FrozenRef]:
    """Identify a run's frozen models, role -> directory, by digests before they are loaded. Collective.

    Raises:
        UserError: one is not what the run began with; on every rank.
    """
    models = {
        role: frozen.digest_model_together(role, directory, control)
        for role, directory in directories.items()
    }
    control.from_coordinator(lambda: pin_models(run, list(models.values())))
    return models


def saving(config: Config, run: RunDir, attempt: Attempt, control: ControlGroup) -> Saving:
    """The run's checkpoints, as this attempt makes and keeps them. Collective."""
    manager = CheckpointManager(
        run,
        config.checkpoint.keep or 0,  # 0: all
        keep_every_steps=config.checkpoint.keep_every_steps,
        attempt=attempt.number,
    )
    return Saving(
        manager, config.checkpoint, control, config.run.steps, tell=partial(tell, attempt)
    )


def walltime_guard(run: RunDir, attempt: Attempt) -> WalltimeGuard:
    """The coordinator's: it knows how long the phases of earlier attempts took."""
    return WalltimeGuard(Deadline(read_json(attempt.started)["end_time"]), read_metrics(run))


def save_points(
    attempt: Attempt, flag: StopFlag, control: ControlGroup, guard: WalltimeGuard | None
) -> SavePoints:
    return SavePoints(flag, control, guard, lambda reason: announce_stop(attempt, reason))
