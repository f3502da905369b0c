"""What is learned from an experience: advantages, and the loss of a token.

The trainer knows packing, pipelines and optimizers; an :class:`Algorithm` knows none of them.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
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
from hpc_rlhf.learner.losses import kl_penalty, policy_loss
from hpc_rlhf.learner.packing import MicroBatch
from hpc_rlhf.learner.rewards import overlong_penalty
from hpc_rlhf.types import Experience

logger = logging.getLogger(__name__)

ADVANTAGES, OLD, REF, IMPORTANCE = "advantages", "old_logprobs", "ref_logprobs", "importance"


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

    def lesson(self, experience: Experience) -> Lesson:
        """Advantages and whatever else the loss reads, from the whole batch of rollouts.

        Raises:
            ValueError: the experience has no reference log-probs, and the KL penalty needs them.
        """
        ...

    def with_kl_coef(self, coef: float) -> Self:
        """The same algorithm under another coefficient of the KL penalty."""
        ...


# Rewards [N], KL penalties of the tokens N x [T_i], groups [N] -> an advantage for each token.
Estimator = Callable[[NDArray[np.float64], Sequence[NDArray[np.float64]], NDArray[np.intp]], Ragged]


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
    """Critic-free policy gradient: GRPO, RLOO, REINFORCE++ and what is made of them by settings.

    They differ in ``estimator``, and in the surrogate's ratio and bounds. With one optimizer step
    per batch of rollouts the ratio is 1 and the gradient that of REINFORCE with a baseline. (TRL's
    RLOO forms the ratio of whole completions instead of tokens; the two gradients are equal in that
    case, and the token's clipping has less variance otherwise.)

    The KL penalty against the reference is either in the reward, as ``coef k(old, ref)`` off each
    token's (Ziegler et al., arXiv:1909.08593, eq. 2; Ahmadian et al., arXiv:2402.14740, eq. 3; TRL's
    RLOO), or in the loss: see :class:`Surrogate`.
    """

    estimator: Estimator
    surrogate: Surrogate
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
        rewards, metrics = shaped_rewards(experience, self.overlong, self.max_new_tokens)
        penalties = kl_penalties(experience, self.surrogate.kl)
        estimated = self.estimator(rewards, penalties, _groups(experience))
        return make_lesson(experience, estimated, metrics, self.overlong, self.off_policy)

    def token_loss(self, batch: MicroBatch, outputs: Outputs) -> TokenLoss:
        return self.surrogate.token_loss(batch, outputs)


def make_algorithm(config: AlgorithmConfig, *, max_new_tokens: int | None = None) -> Algorithm:
    """The algorithm that ``config`` names.

    Args:
        max_new_tokens: the sampler's, where completions are cut; ``config.overlong`` needs it.
    """
    _warn(config)
    return PolicyGradient(
        estimator=_estimator(config),
        surrogate=Surrogate(
            ratio=config.ratio,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            entropy_coef=config.entropy_coef,
            kl=config.kl,
        ),
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
    estimated: Ragged,
    metrics: Mapping[str, float],
    overlong: OverlongConfig,
    correction: OffPolicyConfig,
) -> Lesson:
    """The lesson of these advantages: what every policy loss reads, with off-policy correction."""
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
    fields: dict[str, Ragged] = {ADVANTAGES: estimated, OLD: old}
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
            return partial(_of_groups, partial(advantages.grpo, normalize_std=config.normalize_std))
        case AlgorithmName.RLOO:
            return partial(_of_groups, advantages.rloo)
        case AlgorithmName.REINFORCE_PLUS_PLUS:
            return partial(advantages.reinforce_plus_plus, group_baseline=config.group_baseline)


def _of_groups(
    estimate: Callable[[NDArray[np.float64], NDArray[np.intp]], NDArray[np.float32]],
    rewards: NDArray[np.float64],
    penalties: Sequence[NDArray[np.float64]],
    groups: NDArray[np.intp],
) -> Ragged:
    """One advantage a completion, of its reward less the penalties of all its tokens."""
    penalised = rewards - np.array([p.sum() for p in penalties])
    return spread(estimate(penalised, groups), [len(p) for p in penalties])


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
