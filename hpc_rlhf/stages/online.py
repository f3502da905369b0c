"""The online stage: what a learner rank does."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rlhf.cluster.signals import DEFAULT_SIGNALS, StopFlag
from hpc_rlhf.cluster.world import World
from hpc_rlhf.config import Config, Recompute
from hpc_rlhf.data.chat import eos_token_ids, load_tokenizer
from hpc_rlhf.data.prompts import PromptDataset
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.launch.job_plan import JobPlan
from hpc_rlhf.learner.algorithms import make_algorithm
from hpc_rlhf.learner.kl_control import KlController
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.loop import train
from hpc_rlhf.models.megatron import freeze
from hpc_rlhf.observe.metrics import MetricsWriter
from hpc_rlhf.observe.startup import CHECKPOINT, DATA, DIGESTS, GROUPS, LOAD, SAMPLERS, WARM_UP
from hpc_rlhf.observe.timeline import Timeline
from hpc_rlhf.online_run import Coordinator, OnlineRun
from hpc_rlhf.rollout.sampler import SamplerPool
from hpc_rlhf.run_dir import Attempt, RunDir
from hpc_rlhf.runs import pin_data
from hpc_rlhf.scoring.verifiers import make_verifier
from hpc_rlhf.stages.warmup import warm_up
from hpc_rlhf.stages.world import (
    LearnerWorld,
    checkpoint_manager,
    join,
    load_model,
    pin_reference,
    save_points,
    walltime_guard,
)
from hpc_rlhf.sync.collective import CollectiveTransport
from hpc_rlhf.types import Phase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def run_learner(
    config: Config, plan: JobPlan, attempt: Attempt, world: World, timeline: Timeline
) -> ExitCode:
    """One learner rank, from the empty process to the end of the attempt."""
    flag = StopFlag()
    with flag.installed((*DEFAULT_SIGNALS, config.cluster.signal)):
        with timeline.phase(0, Phase.SETUP):
            timeline.part(GROUPS)
            joined = join(config, attempt, world)
            run = _build(config, plan, attempt, joined, flag, timeline)
        try:
            return train(run, timeline)
        finally:
            run.close()


def _build(
    config: Config,
    plan: JobPlan,
    attempt: Attempt,
    world: LearnerWorld,
    flag: StopFlag,
    timeline: Timeline,
) -> OnlineRun:
    """Model, optimizer, data and clients, with the newest checkpoint loaded."""
    learner, run, control = config.learner, plan.run, world.control
    timeline.part(DATA)
    tokenizer = load_tokenizer(Path(config.model.path)) if world.rank == 0 else None
    timeline.part(WARM_UP)
    source = warm_up(config, run, control, tokenizer)

    algorithm = make_algorithm(config.algorithm, max_new_tokens=config.sampling.max_new_tokens)
    reference_path = Path(config.model.reference or source) if algorithm.needs_reference else None
    if reference_path is not None:
        timeline.part(DIGESTS)
        pin_reference(reference_path, run, control)

    timeline.part(LOAD)
    model = load_model(config, source, learner.recompute)
    reference = None
    if reference_path is not None:
        reference = freeze(load_model(config, reference_path, Recompute.NONE))
    trainer = Trainer(
        model,
        learner,
        total_steps=config.run.steps * algorithm.epochs * algorithm.mini_batches,
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        seed=config.run.seed,
    )
    coordinator = None
    if tokenizer is not None:
        timeline.part(DATA)
        coordinator = _coordinate(config, plan, attempt, tokenizer)
    online = OnlineRun(
        directory=run,
        attempt=attempt.number,
        config=config.run,
        sampling=config.sampling,
        checkpoint=config.checkpoint,
        algorithm=algorithm,
        kl=KlController.of(config.algorithm.kl),
        off_policy=config.algorithm.off_policy,
        trainer=trainer,
        reference=reference,
        transport=CollectiveTransport(
            config.sync,
            control,
            world.store,
            world.address,
            coordinator.pool if coordinator else None,
        ),
        checkpoints=checkpoint_manager(config.checkpoint, run, attempt),
        control=control,
        save_points=save_points(
            attempt, flag, control, coordinator.walltime if coordinator else None
        ),
        source=Path(config.model.path),
        coordinator=coordinator,
        startup=timeline.startup,
    )
    timeline.part(CHECKPOINT)
    online.resume()
    if coordinator is not None:
        timeline.part(SAMPLERS)
        coordinator.pool.wait_until_ready()
    return online


def _coordinate(
    config: Config,
    plan: JobPlan,
    attempt: Attempt,
    tokenizer: "PreTrainedTokenizerBase",
) -> Coordinator:
    """What rank 0 holds beside its share of the model."""
    run: RunDir = plan.run
    dataset = PromptDataset.load(
        config.data, tokenizer, max_sequence_tokens=config.model.max_sequence_tokens
    )
    assert config.data.prompts is not None
    pin_data(run, {config.data.prompts: dataset.sha256})
    pool = SamplerPool(
        attempt,
        run.ensure_token(),
        config.sampler,
        config.sampling,
        plan.component("sampler").replicas,
        eos_token_ids(tokenizer, Path(config.model.path)),
        config.model.max_sequence_tokens,
    )
    return Coordinator(
        dataset=dataset,
        pool=pool,
        verifiers=make_verifier(config.reward, tokenizer),
        metrics=MetricsWriter(run),
        walltime=walltime_guard(run, attempt),
    )
