"""The online stage: what a learner rank does."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.cluster.signals import DEFAULT_SIGNALS, StopFlag
from hpc_rlhf.cluster.world import World
from hpc_rlhf.config import Config, CriticKind, Recompute, RewardName
from hpc_rlhf.data.chat import eos_token_ids, load_tokenizer, same_tokens
from hpc_rlhf.data.prompts import PromptDataset
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.launch.job_plan import JobPlan
from hpc_rlhf.learner.actor_critic import ActorCritic
from hpc_rlhf.learner.algorithms import Algorithm, make_algorithm
from hpc_rlhf.learner.kl_control import KlController
from hpc_rlhf.learner.runner import Runner
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.loop import train
from hpc_rlhf.models.heads import zero_score_weight
from hpc_rlhf.models.megatron import freeze
from hpc_rlhf.models.parallel import add_layout
from hpc_rlhf.observe.metrics import MetricsWriter
from hpc_rlhf.observe.startup import CHECKPOINT, DATA, DIGESTS, GROUPS, LOAD, SAMPLERS, WARM_UP
from hpc_rlhf.observe.timeline import Timeline
from hpc_rlhf.online_run import Coordinator, OnlineRun
from hpc_rlhf.rollout.sampler import SamplerPool
from hpc_rlhf.run_dir import Attempt, RunDir
from hpc_rlhf.runs import pin_data
from hpc_rlhf.scoring.reward_model import ChatTranslation, RewardModelScorer
from hpc_rlhf.scoring.scorer import Scorer, VerifierScorer
from hpc_rlhf.scoring.verifiers import make_verifier
from hpc_rlhf.stages.warmup import warm_up
from hpc_rlhf.stages.world import (
    LearnerWorld,
    join,
    load_model,
    pin_frozen,
    save_points,
    saving,
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
    run, control = plan.run, world.control
    timeline.part(DATA)
    tokenizer = load_tokenizer(Path(config.model.path)) if world.rank == 0 else None
    timeline.part(WARM_UP)
    source = warm_up(config, run, control, tokenizer)

    algorithm = make_algorithm(
        config.algorithm, config.critic, max_new_tokens=config.sampling.max_new_tokens
    )
    frozen_models: dict[str, Path] = {}
    if algorithm.needs_reference:
        frozen_models["reference"] = Path(config.model.reference or source)
    if config.reward.model is not None:
        frozen_models["reward"] = Path(config.reward.model)
    if frozen_models:
        timeline.part(DIGESTS)
        pin_frozen(frozen_models, run, control)

    timeline.part(LOAD)
    trainer = _actor_critic(config, algorithm, source)
    reference = None
    if algorithm.needs_reference:
        reference = freeze(load_model(config, frozen_models["reference"], Recompute.NONE))
    scorer = _scorer(config, trainer.policy.runner, control, tokenizer)
    coordinator = None
    if tokenizer is not None:
        timeline.part(DATA)
        coordinator = _coordinate(config, plan, attempt, tokenizer)
    online = OnlineRun(
        directory=run,
        attempt=attempt.number,
        config=config.run,
        sampling=config.sampling,
        algorithm=algorithm,
        kl=KlController.of(config.algorithm.kl),
        off_policy=config.algorithm.off_policy,
        critic_warmup_steps=config.critic.warmup_steps if algorithm.critic else 0,
        max_skipped_steps=config.algorithm.max_skipped_steps,
        sampling_rounds=1 + config.algorithm.resampling_rounds,
        trainer=trainer,
        reference=reference,
        scorer=scorer,
        transport=CollectiveTransport(
            config.sync,
            control,
            world.store,
            world.address,
            coordinator.pool if coordinator else None,
        ),
        saving=saving(config, run, attempt, control),
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


def _actor_critic(config: Config, algorithm: Algorithm, source: Path) -> ActorCritic:
    """The policy and, as configured, its critic, with optimizers."""
    learner, critic = config.learner, config.critic
    is_shared = algorithm.critic is not None and critic.kind is CriticKind.SHARED
    is_separate = algorithm.critic is not None and critic.kind is CriticKind.SEPARATE
    per_step = algorithm.epochs * algorithm.mini_batches
    # On a shared trunk the critic's first steps are the policy's optimizer's, too.
    waits = critic.warmup_steps if is_separate else 0
    policy = Trainer(
        load_model(config, source, learner.recompute, score=is_shared, new_head=zero_score_weight),
        learner,
        total_steps=(config.run.steps - waits) * per_step,
        temperature=config.sampling.temperature,
    )
    own = None
    if is_separate:
        parallel = critic.parallel.over(learner.parallel)
        add_layout(parallel, timeout_s=learner.collective_timeout_s)
        model = load_model(
            config,
            Path(critic.path or source),
            learner.recompute,
            parallel=parallel,
            lm=False,
            score=True,
            new_head=zero_score_weight,
        )
        own = Trainer(
            model,
            replace(learner, optimizer=critic.optimizer),
            total_steps=config.run.steps * per_step,
            name="critic",
        )
    return ActorCritic(
        policy, own, max_new_tokens=config.sampling.max_new_tokens, seed=config.run.seed
    )


def _scorer(
    config: Config,
    runner: Runner,
    control: ControlGroup,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> Scorer:
    """What rewards the rollouts; ``tokenizer`` is the coordinator's."""
    reward = config.reward
    if reward.name is not RewardName.MODEL:
        pool = make_verifier(reward, tokenizer) if tokenizer is not None else None
        return VerifierScorer(pool, control)
    assert reward.model is not None
    directory = Path(reward.model)
    translation = None
    if tokenizer is not None:
        other = load_tokenizer(directory)
        if not same_tokens(tokenizer, other):
            translation = ChatTranslation(
                tokenizer, other, eos_token_ids(other, directory), config.data
            )
    model = load_model(config, directory, Recompute.NONE, lm=False, score=True)
    return RewardModelScorer(
        freeze(model),
        runner,
        control,
        max_tokens=min(model.spec.max_positions, runner.capacity),
        max_failure_fraction=reward.max_failure_fraction,
        translation=translation,
    )


def _coordinate(
    config: Config,
    plan: JobPlan,
    attempt: Attempt,
    tokenizer: "PreTrainedTokenizerBase",
) -> Coordinator:
    """What rank 0 holds beside its share of the model."""
    run: RunDir = plan.run
    dataset = PromptDataset.load(
        config.data,
        tokenizer,
        max_sequence_tokens=config.model.max_sequence_tokens,
        exact=config.reward.name is RewardName.EXACT,
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
        metrics=MetricsWriter(run),
        walltime=walltime_guard(run, attempt),
    )
