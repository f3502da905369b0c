"""What the online stage learns by: algorithm, critic and reward model, checked before anything runs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rlhf.config import (
    AlgorithmName,
    Config,
    CriticConfig,
    CriticKind,
    ImportanceWeight,
    OffPolicyConfig,
    Proximal,
    RewardName,
    Stage,
)
from hpc_rlhf.data.chat import load_tokenizer, same_tokens, same_vocabulary
from hpc_rlhf.errors import UserError
from hpc_rlhf.models.hf_layout import SCORE_WEIGHT, HfModelSpec
from hpc_rlhf.planner.weights import check_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_settings(config: Config) -> None:
    """Check the values that say how the online stage learns; reads no file.

    Raises:
        UserError: the first setting that cannot work.
    """
    algorithm = config.algorithm
    compares = algorithm.name in (AlgorithmName.GRPO, AlgorithmName.RLOO)
    if (compares or algorithm.group_baseline) and config.sampling.samples_per_prompt < 2:
        raise UserError(
            f"sampling.samples_per_prompt={config.sampling.samples_per_prompt}: "
            f"{algorithm.name} compares the samples of a prompt, so it needs at least 2"
        )
    if algorithm.group_baseline and algorithm.name is not AlgorithmName.REINFORCE_PLUS_PLUS:
        raise UserError(
            f"algorithm.group_baseline=true: of algorithm.name={AlgorithmName.REINFORCE_PLUS_PLUS} "
            f"only, {algorithm.name} has a baseline of its own"
        )
    if algorithm.resampling_rounds and not compares:
        raise UserError(
            f"algorithm.resampling_rounds={algorithm.resampling_rounds}: with algorithm.name="
            f"{algorithm.name} samples of equal reward have advantages, too; it is of grpo and rloo"
        )
    _check_kl(config)
    _check_off_policy(algorithm.off_policy)
    _check_critic(config)
    _check_reward_model(config)


def _check_kl(config: Config) -> None:
    kl = config.algorithm.kl
    if kl.target is not None and kl.coef == 0:
        raise UserError(
            "algorithm.kl.target: an adaptive coefficient is multiplied, so that "
            "algorithm.kl.coef=0 stays 0; give it a coefficient to start from"
        )
    if config.model.reference is not None and kl.coef == 0:
        raise UserError("model.reference is given, but algorithm.kl.coef=0 holds no reference")


def _check_off_policy(off_policy: OffPolicyConfig) -> None:
    if off_policy.proximal is Proximal.SAMPLER and off_policy.weight is not ImportanceWeight.NONE:
        raise UserError(
            f"algorithm.off_policy.weight={off_policy.weight}: with proximal=sampler the ratio "
            "itself is against the sampler, and a weight would count it twice; use weight=none or "
            "proximal=learner"
        )
    for name in ("token_bounds", "sequence_bounds", "geometric_bounds"):
        bounds = getattr(off_policy, name)
        if bounds is not None and not (len(bounds) == 2 and 0 <= bounds[0] < 1 < bounds[1]):
            raise UserError(
                f"algorithm.off_policy.{name}={bounds}: expected [low, high] of the ratio learner / "
                "sampler, with low in [0, 1) and high above 1, the ratio of samples of the "
                "learner's own policy"
            )
    if off_policy.stop_kl is not None and not off_policy.stop_kl >= off_policy.warn_kl:
        raise UserError(
            f"algorithm.off_policy.stop_kl={off_policy.stop_kl}: must be at least warn_kl="
            f"{off_policy.warn_kl}"
        )


def _check_critic(config: Config) -> None:
    critic, algorithm = config.critic, config.algorithm
    if algorithm.name is not AlgorithmName.PPO:
        asked = {name for name in ("path", "warmup_steps") if getattr(critic, name)}
        asked |= _own_layout(critic)
        if asked:
            raise UserError(
                f"critic.{min(asked)}: algorithm.name={algorithm.name} has no critic; "
                "algorithm=ppo has"
            )
        return
    if critic.warmup_steps >= config.run.steps:
        raise UserError(
            f"critic.warmup_steps={critic.warmup_steps}: of run.steps={config.run.steps} none would "
            "be left for the policy"
        )
    if critic.kind is CriticKind.SHARED:
        _check_shared_critic(critic, config)


def has_own_critic(config: Config) -> bool:
    """Whether a critic is learned that is a model of its own."""
    return (
        config.stage is Stage.ONLINE
        and config.algorithm.name is AlgorithmName.PPO
        and config.critic.kind is CriticKind.SEPARATE
    )


def _own_layout(critic: CriticConfig) -> set[str]:
    """Names of what is asked for of its layout, which only a model of its own has."""
    return {f"parallel.{name}" for name, value in asdict(critic.parallel).items() if value}


def _check_shared_critic(critic: CriticConfig, config: Config) -> None:
    asked = _own_layout(critic) | ({"path"} if critic.path is not None else set())
    if asked:
        raise UserError(
            f"critic.{min(asked)}: with critic.kind=shared the critic is a head on the policy; use "
            "critic.kind=separate"
        )
    if critic.warmup_steps and config.learner.optimizer.weight_decay:
        raise UserError(
            f"critic.warmup_steps={critic.warmup_steps}: on a shared trunk, "
            f"learner.optimizer.weight_decay={config.learner.optimizer.weight_decay} would decay the "
            "policy while only its critic learns; set weight_decay=0, or critic.kind=separate"
        )


def _check_reward_model(config: Config) -> None:
    reward = config.reward
    if reward.name is RewardName.MODEL:
        if reward.model is None:
            raise UserError("reward.name=model needs reward.model, a reward model's directory")
    elif reward.model is not None or reward.retokenize:
        raise UserError(
            f"reward.model and reward.retokenize are of reward.name=model, and it is {reward.name}"
        )


def check_directories(config: Config) -> None:
    """Check that the other models are there at all, before what takes longer.

    Raises:
        UserError: one is not.
    """
    for name, directory in (
        ("model.reference", config.model.reference),
        ("critic.path", config.critic.path),
        ("reward.model", config.reward.model),
    ):
        if directory is not None and not Path(directory).is_dir():
            raise UserError(f"{name}={directory}: no such directory")


def check_models(
    config: Config,
    spec: HfModelSpec,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    reward_model_to_come: bool = False,
) -> None:
    """Check that critic and reward model fit the policy and the learner's layout.

    Args:
        spec: the policy's.
        tokenizer: the policy's.
        reward_model_to_come: ``reward.model`` is what a reward model will be trained from.

    Raises:
        UserError: they do not.
    """
    parallel = config.learner.parallel
    if has_own_critic(config):
        path = config.critic.path
        of_critic = config.critic.parallel.over(parallel)
        critic = spec if path is None else HfModelSpec.from_directory(path)
        critic.check_parallel(of_critic.tensor, of_critic.pipeline, setting="critic.parallel")
    if config.critic.path is not None:
        if critic.vocab_size != spec.vocab_size:
            raise UserError(
                f"critic.path={config.critic.path}: a vocabulary of {critic.vocab_size}, but the "
                f"policy's has {spec.vocab_size}; the critic reads the policy's tokens"
            )
        if not same_vocabulary(tokenizer, load_tokenizer(Path(config.critic.path))):
            raise UserError(
                f"critic.path={config.critic.path}: the tokens of its tokenizer are not those of "
                f"model.path={config.model.path}; the critic reads the policy's tokens and would take "
                "them for others. Begin it as a model of the same tokenizer"
            )
        _check_context(config, "critic.path", critic)
        heads = critic.with_heads(lm=False, score=True)
        check_weights(Path(config.critic.path), heads, optional=(SCORE_WEIGHT,))
    if config.reward.model is not None:
        directory = Path(config.reward.model)
        reward = HfModelSpec.from_directory(directory)
        reward.check_parallel(parallel.tensor, parallel.pipeline)
        if not reward.is_classifier and not reward_model_to_come:
            raise UserError(
                f"reward.model={directory}: a language model ({reward.source} says so), not a reward "
                "model; train one with stage=reward_model"
            )
        _check_context(config, "reward.model", reward)
        optional = (SCORE_WEIGHT,) if reward_model_to_come else ()
        check_weights(directory, reward.with_heads(lm=False, score=True), optional=optional)
        if not same_tokens(tokenizer, load_tokenizer(directory)) and not config.reward.retokenize:
            raise UserError(
                f"reward.model={directory}: its tokenizer or chat template is not that of "
                f"model.path={config.model.path}; it would read other text than was written. Use a "
                "reward model of the same tokenizer, or set reward.retokenize=true to render and "
                "tokenise every sample again"
            )


def _check_context(config: Config, name: str, spec: HfModelSpec) -> None:
    if spec.max_positions < config.model.max_sequence_tokens:
        raise UserError(
            f"{name}: a context of {spec.max_positions} tokens ({spec.source}), fewer than "
            f"model.max_sequence_tokens={config.model.max_sequence_tokens}"
        )
