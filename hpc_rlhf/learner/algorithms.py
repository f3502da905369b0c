"""What is learned from an experience: advantages, and the loss of a token.

The trainer knows packing, pipelines and optimizers; an :class:`Algorithm` knows none of them.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_rlhf.config import (
    AlgorithmConfig,
    AlgorithmName,
    CriticConfig,
    CriticKind,
    KlConfig,
    KlEstimator,
    KlPlacement,
    LossMean,
    OffPolicyConfig,
    OverlongConfig,
    Proximal,
    Ratio,
)
from hpc_rlhf.learner import advantages, off_policy
from hpc_rlhf.learner.advantages import Ragged, spread
from hpc_rlhf.learner.losses import kl_penalty, policy_loss, value_loss
from hpc_rlhf.learner.packing import MicroBatch
from hpc_rlhf.learner.rewards import overlong_penalty
from hpc_rlhf.types import Experience

logger = logging.getLogger(__name__)

# Fields of a lesson, and of the packed micro-batches made of it.
ADVANTAGES, OLD, REF, IMPORTANCE = "advantages", "old_logprobs", "ref_logprobs", "importance"
RETURNS, OLD_VALUES = "returns", "old_values"


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a model makes of the positions to learn from, with gradient; float32 [T], 0 on the others.

    None where the model has no such head.
    """

    log_probs: Tensor | None = None  # of the targets
    entropy: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of every position and what to report of it; all zeros where the mask is False.

    A loss of several sequences sits on the last position of their item.
    """

    loss: Tensor  # float32 [T], with gradient
    means: Mapping[str, Tensor] = field(default_factory=dict)  # [T], reported as token means
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # [T], reported as maxima
    sequences: Tensor | None = None  # [num_sequences], a number of each, which all ranks will get


class Loss(Protocol):
    """A loss per position of a packed micro-batch; how it is averaged is the business of who packs.

    The items' field :data:`~hpc_rlhf.learner.packing.WEIGHT` says it, position by position.
    """

    def token_loss(self, batch: MicroBatch, outputs: Outputs) -> TokenLoss: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What an algorithm makes of an experience, before the first optimizer step; N x [T_i] each."""

    fields: Mapping[str, Ragged]  # what its loss will read of every completion token
    learned: tuple[NDArray[np.bool_], ...]  # which completion tokens to learn from at all
    metrics: Mapping[str, float]


class Algorithm(Loss, Protocol):
    """Turns scored rollouts into a loss. Frozen: what adapts over time is in the run state."""

    @property
    def loss_mean(self) -> LossMean: ...

    @property
    def epochs(self) -> int: ...

    @property
    def mini_batches(self) -> int: ...

    @property
    def needs_reference(self) -> bool:
        """Whether ``Experience.ref_logprobs`` must be there."""
        ...

    @property
    def critic(self) -> "CriticLoss | None":
        """What a critic learns by; ``Experience.values`` must then be there. None: there is none."""
        ...

    def lesson(self, experience: Experience) -> Lesson:
        """Advantages and whatever else the loss reads, from the whole batch of rollouts.

        Raises:
            ValueError: reference log-probs or values are needed, and the experience has none.
        """
        ...

    def with_kl_coef(self, coef: float) -> Self:
        """The same algorithm under another coefficient of the KL penalty."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What advantages are estimated from."""

    rewards: NDArray[np.float64]  # [N], of whole completions
    penalties: tuple[NDArray[np.float64], ...]  # N x [T_i], what the KL takes off at each token
    groups: NDArray[np.intp]  # [N], equal for samples of one prompt
    values: Ragged | None  # N x [T_i]


Estimator = Callable[[Signals], dict[str, Ragged]]  # -> fields of the lesson, ADVANTAGES at least


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticLoss:
    """The critic's loss of a token: clipped squared error against the returns."""

    clip: float

    def token_loss(self, batch: MicroBatch, outputs: Outputs) -> TokenLoss:
        """Reads ``returns`` and ``old_values``; reports the means ``value_loss``, ``value`` and
        ``value_clip_fraction``."""
        mask, values = batch.loss_mask, outputs.scores
        assert values is not None
        critic = value_loss(
            values, batch.fields[OLD_VALUES], batch.fields[RETURNS], mask, self.clip
        )
        means = {
            "value_loss": critic.loss.detach(),
            "value": torch.where(mask, values.detach(), 0.0),
            "value_clip_fraction": critic.clipped.float(),
        }
        return TokenLoss(loss=critic.loss, means=means)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """The policy's loss of a token: clipped surrogate, KL penalty, entropy bonus.

    ``importance * -min(r A, clip(r) A) + coef k(new, ref) - entropy_coef H``, all under one mean.
    The KL term is there when ``kl.placement`` is ``LOSS`` (DeepSeekMath, arXiv:2402.03300, eq. 3).
    """

    ratio: Ratio
    clip_low: float
    clip_high: float
    entropy_coef: float
    kl: KlConfig

    def token_loss(self, batch: MicroBatch, outputs: Outputs) -> TokenLoss:
        """Surrogate, KL penalty and entropy bonus of every token.

        Reads the fields ``advantages``, ``old_logprobs`` and, where they are there,
        ``ref_logprobs`` and ``importance``. Reports the means ``policy_loss`` (of the surrogate),
        ``ratio_mean``, ``clip_fraction`` and, where reference log-probs are there, ``kl`` (k3,
        whatever estimator is trained with), and the maximum ``ratio_max``.
        """
        mask, log_probs = batch.loss_mask, outputs.log_probs
        assert log_probs is not None
        policy = policy_loss(
            log_probs,
            batch.fields[OLD],
            batch.fields[ADVANTAGES],
            mask,
            self.clip_low,
            self.clip_high,
            cu_seqlens=batch.cu_seqlens if self.ratio is Ratio.SEQUENCE else None,
        )
        loss = policy.loss
        if IMPORTANCE in batch.fields:
            loss = loss * batch.fields[IMPORTANCE]
        means = {
            "policy_loss": loss.detach(),
            "ratio_mean": torch.where(mask, policy.ratio, 0.0),
            "clip_fraction": policy.clipped.float(),
        }
        if self.kl.coef and self.kl.placement is KlPlacement.LOSS:
            penalty = kl_penalty(log_probs, batch.fields[REF], mask, self.kl.estimator)
            loss = loss + self.kl.coef * penalty
        if self.entropy_coef:
            assert outputs.entropy is not None
            loss = loss - self.entropy_coef * torch.where(mask, outputs.entropy, 0.0)
        if REF in batch.fields:
            means["kl"] = kl_penalty(log_probs.detach(), batch.fields[REF], mask, KlEstimator.K3)
        maxima = {"ratio_max": torch.where(mask, policy.ratio, 0.0)}
        return TokenLoss(loss=loss, means=means, maxima=maxima)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """Policy gradient: GRPO, RLOO, REINFORCE++, PPO and what is made of them by settings.

    They differ in ``estimator``, and in the surrogate's ratio and bounds; PPO has a critic, too.
    With one optimizer step per batch of rollouts the ratio is 1 and the gradient that of REINFORCE
    with a baseline. (TRL's RLOO forms the ratio of whole completions instead of tokens; the two
    gradients are equal in that case, and the token's clipping has less variance otherwise.)

    The KL penalty against the reference is either in the reward, as ``coef k(old, ref)`` off each
    token's (Ziegler et al., arXiv:1909.08593, eq. 2; Ahmadian et al., arXiv:2402.14740, eq. 3; TRL's
    RLOO), or in the loss: see :class:`Surrogate`.
    """

    estimator: Estimator
    surrogate: Surrogate
    critic: CriticLoss | None = None
    shared_critic_coef: float | None = None  # of the critic's loss, where it shares the trunk
    loss_mean: LossMean
    epochs: int
    mini_batches: int
    overlong: OverlongConfig
    off_policy: OffPolicyConfig
    max_new_tokens: int | None  # where completions are cut; punishing overlong ones needs it

    @property
    def needs_reference(self) -> bool:
        return self.surrogate.kl.coef != 0.0

    def with_kl_coef(self, coef: float) -> "PolicyGradient":
        kl = replace(self.surrogate.kl, coef=coef)
        return replace(self, surrogate=replace(self.surrogate, kl=kl))

    def lesson(self, experience: Experience) -> Lesson:
        if self.needs_reference and experience.ref_logprobs is None:
            raise ValueError("the KL penalty needs reference log-probs, the experience has none")
        if self.critic is not None and experience.values is None:
            raise ValueError("the advantages need a critic's values, the experience has none")
        rewards, metrics = shaped_rewards(experience, self.overlong, self.max_new_tokens)
        fields = self.estimator(
            Signals(
                rewards=rewards,
                penalties=kl_penalties(experience, self.surrogate.kl),
                groups=_groups(experience),
                values=experience.values,
            )
        )
        if self.critic is not None and experience.values is not None:
            fields[OLD_VALUES] = experience.values
            fraction = advantages.explained_variance(fields[RETURNS], experience.values)
            metrics["explained_variance"] = fraction
        return make_lesson(experience, fields, metrics, self.overlong, self.off_policy)

    def token_loss(self, batch: MicroBatch, outputs: Outputs) -> TokenLoss:
        policy = self.surrogate.token_loss(batch, outputs)
        if self.critic is None or self.shared_critic_coef is None:
            return policy
        critic = self.critic.token_loss(batch, outputs)
        return TokenLoss(
            loss=policy.loss + self.shared_critic_coef * critic.loss,
            means={**policy.means, **critic.means},
            maxima=policy.maxima,
        )


def make_algorithm(
    config: AlgorithmConfig,
    critic: CriticConfig | None = None,
    *,
    max_new_tokens: int | None = None,
) -> Algorithm:
    """The algorithm that ``config`` names.

    Args:
        critic: of PPO, default: its defaults; others have none.
        max_new_tokens: the sampler's, where completions are cut; ``config.overlong`` needs it.
    """
    _warn(config)
    has_critic = config.name is AlgorithmName.PPO
    critic = critic or CriticConfig()
    is_shared = has_critic and critic.kind is CriticKind.SHARED
    return PolicyGradient(
        estimator=_estimator(config),
        surrogate=Surrogate(
            ratio=config.ratio,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            entropy_coef=config.entropy_coef,
            kl=config.kl,
        ),
        critic=CriticLoss(clip=critic.clip) if has_critic else None,
        shared_critic_coef=critic.coef if is_shared else None,
        loss_mean=config.loss_mean,
        epochs=config.epochs,
        mini_batches=config.mini_batches,
        overlong=config.overlong,
        off_policy=config.off_policy,
        max_new_tokens=max_new_tokens,
    )


def shaped_rewards(
    experience: Experience, overlong: OverlongConfig, max_new_tokens: int | None
) -> tuple[NDArray[np.float64], dict[str, float]]:
    """Rewards [N] with the punishment of overlong completions, and metrics of it."""
    rewards = np.asarray(experience.rewards, np.float64)
    if overlong.buffer_fraction == 0:
        return rewards, {}
    if max_new_tokens is None:
        raise ValueError("overlong.buffer_fraction is of max_new_tokens, which is not given")
    lengths = [len(r.completion.token_ids) for r in experience.rollouts]
    buffer = overlong.buffer_fraction * max_new_tokens
    penalty = overlong_penalty(lengths, max_new_tokens, buffer, overlong.penalty)
    return rewards + penalty, {"reward/overlong": float(penalty.mean())}


def kl_penalties(experience: Experience, kl: KlConfig) -> tuple[NDArray[np.float64], ...]:
    """What the KL penalty takes off each token's reward, ``coef k(old, ref)``, N x [T_i].

    Zeros where the penalty is not in the reward.
    """
    if not kl.coef or kl.placement is not KlPlacement.REWARD:
        return tuple(np.zeros(len(old)) for old in experience.old_logprobs)
    assert experience.ref_logprobs is not None
    penalties = []
    for old, ref in zip(experience.old_logprobs, experience.ref_logprobs, strict=True):
        new, base = torch.tensor(old, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64)
        mask = torch.ones_like(new, dtype=torch.bool)
        penalties.append(kl.coef * kl_penalty(new, base, mask, kl.estimator).numpy())
    return tuple(penalties)


def make_lesson(
    experience: Experience,
    estimated: Mapping[str, Ragged],
    metrics: Mapping[str, float],
    overlong: OverlongConfig,
    correction: OffPolicyConfig,
) -> Lesson:
    """The estimated fields with what every policy loss reads, and with off-policy correction."""
    log_ratios = off_policy.sampler_log_ratios(experience)
    weights = off_policy.importance_weights(log_ratios, correction.weight, correction.weight_cap)
    learned = off_policy.accepted(
        log_ratios,
        token_bounds=correction.token_bounds,
        sequence_bounds=correction.sequence_bounds,
        geometric_bounds=correction.geometric_bounds,
    )
    count = sum(len(mask) for mask in learned)
    rejected = count - sum(int(mask.sum()) for mask in learned)
    if overlong.drop_truncated:
        cut = [r.completion.finish_reason == "length" for r in experience.rollouts]
        learned = tuple(m & (not c) for m, c in zip(learned, cut, strict=True))
    old = experience.old_logprobs
    if correction.proximal is Proximal.SAMPLER:
        old = tuple(rollout.completion.logprobs for rollout in experience.rollouts)
    fields: dict[str, Ragged] = {**estimated, OLD: old}
    metrics = {**metrics, "rejected_fraction": rejected / max(count, 1)}
    if experience.ref_logprobs is not None:
        fields[REF] = experience.ref_logprobs
    if weights is not None:
        fields[IMPORTANCE] = weights
        metrics["importance_mean"] = sum(float(w.sum()) for w in weights) / max(count, 1)
    return Lesson(fields=fields, learned=learned, metrics=metrics)


def _estimator(config: AlgorithmConfig) -> Estimator:
    match config.name:
        case AlgorithmName.GRPO:
            estimate = partial(advantages.grpo, normalize_std=config.normalize_std)
            return partial(_of_groups, estimate)
        case AlgorithmName.RLOO:
            return partial(_of_groups, advantages.rloo)
        case AlgorithmName.REINFORCE_PLUS_PLUS:
            return partial(_reinforce_plus_plus, config.group_baseline)
        case AlgorithmName.PPO:
            return partial(_generalised, config.gamma, config.lam)


def _of_groups(
    estimate: Callable[[NDArray[np.float64], NDArray[np.intp]], NDArray[np.float32]],
    signals: Signals,
) -> dict[str, Ragged]:
    """One advantage a completion, of its reward less the penalties of all its tokens."""
    penalised = signals.rewards - np.array([p.sum() for p in signals.penalties])
    lengths = [len(p) for p in signals.penalties]
    return {ADVANTAGES: spread(estimate(penalised, signals.groups), lengths)}


def _reinforce_plus_plus(group_baseline: bool, signals: Signals) -> dict[str, Ragged]:
    return {
        ADVANTAGES: advantages.reinforce_plus_plus(
            signals.rewards, signals.penalties, signals.groups, group_baseline=group_baseline
        )
    }


def _generalised(gamma: float, lam: float, signals: Signals) -> dict[str, Ragged]:
    """PPO's: the reward comes with the last token, the KL penalty with each; then whitened."""
    assert signals.values is not None
    token_rewards = [-p for p in signals.penalties]
    for reward, of_tokens in zip(signals.rewards, token_rewards, strict=True):
        of_tokens[-1:] += reward
    estimates, returns = advantages.gae(token_rewards, signals.values, gamma=gamma, lam=lam)
    return {ADVANTAGES: advantages.whiten(estimates), RETURNS: returns}


def _groups(experience: Experience) -> NDArray[np.intp]:
    """Group of each rollout, [N]: samples of one prompt are one."""
    names = np.array([r.prompt.uid for r in experience.rollouts])
    return np.unique(names, return_inverse=True)[1]


def _warn(config: AlgorithmConfig) -> None:
    """Say what is allowed and rarely meant."""
    kl = config.kl
    if kl.coef and kl.placement is KlPlacement.LOSS and kl.estimator is KlEstimator.K1:
        logger.warning(
            "algorithm.kl.estimator=k1 in the loss has zero gradient in expectation: the policy is "
            "not held near the reference; use k2 or k3, or algorithm.kl.placement=reward"
        )
    if config.ratio is Ratio.SEQUENCE and config.loss_mean is not LossMean.SEQUENCE:
        logger.warning(
            "algorithm.ratio=sequence with algorithm.loss_mean=%s weighs a completion by its length "
            "although its ratio is one number; GSPO's is loss_mean=sequence",
            config.loss_mean,
        )
