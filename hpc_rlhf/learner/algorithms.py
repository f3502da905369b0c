"""What is learned from an experience: advantages, and the loss of a token.

The trainer knows packing, pipelines and optimizers; an :class:`Algorithm` knows none of them.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

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
)
from hpc_rlhf.learner import advantages
from hpc_rlhf.learner.losses import kl_penalty, policy_loss, sft_loss
from hpc_rlhf.learner.packing import MicroBatch
from hpc_rlhf.types import Experience

logger = logging.getLogger(__name__)

AdvantageEstimator = Callable[[NDArray[np.floating], NDArray[np.integer]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of every token and what to report of it; all zeros where the mask is False."""

    loss: Tensor  # float32 [T], with gradient
    means: Mapping[str, Tensor] = field(default_factory=dict)  # [T], reported as token means
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # [T], reported as maxima


class Loss(Protocol):
    """A loss per token of a packed micro-batch; how it is averaged is the trainer's business."""

    def token_loss(self, batch: MicroBatch, log_probs: Tensor) -> TokenLoss:
        """Loss of ``batch`` given the policy's ``log_probs`` float32 [T] of its targets."""
        ...


class Algorithm(Loss, Protocol):
    """Turns scored rollouts into a loss. Frozen: whatever adapts over time is in the run state."""

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

    def needs_old_logprobs(self, epochs: int, mini_batches: int) -> bool:
        """Whether a sweep for the old log-probs changes what is learned.

        With a single optimizer step the old policy is the current one; the sweep then only serves
        the metrics of the mismatch between trainer and sampler.
        """
        ...

    def advantages(self, experience: Experience) -> tuple[NDArray[np.float32], ...]:
        """Advantage of each completion token, N x [T_i], in rollout order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """Critic-free policy gradient: one advantage per completion, clipped surrogate per token.

    GRPO and RLOO differ in ``estimator`` only. With one optimizer step per batch of rollouts the
    ratio is 1 and the gradient that of REINFORCE with a baseline. (TRL's RLOO forms the ratio of
    whole completions instead of tokens; the two gradients are equal in that case, and the token's
    clipping has less variance otherwise.)

    The KL penalty against the reference is either in the reward, as
    ``r - coef * sum over tokens of k(old, ref)`` before the advantage (Ahmadian et al.,
    arXiv:2402.14740, eq. 3; TRL's RLOO), or in the loss, as ``+ coef * k(new, ref)`` of every token
    under the same mean as the policy loss (DeepSeekMath, eq. 3; TRL's GRPO).
    """

    estimator: AdvantageEstimator
    clip_low: float
    clip_high: float
    loss_mean: LossMean
    epochs: int
    mini_batches: int
    kl: KlConfig

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef != 0.0

    def needs_old_logprobs(self, epochs: int, mini_batches: int) -> bool:
        in_reward = self.needs_reference and self.kl.placement is KlPlacement.REWARD
        return in_reward or epochs * mini_batches > 1

    def advantages(self, experience: Experience) -> tuple[NDArray[np.float32], ...]:
        """The group's relative advantage, the same for every token of a completion."""
        rewards = np.asarray(experience.rewards, np.float64)
        if self.needs_reference and self.kl.placement is KlPlacement.REWARD:
            rewards = rewards - self.kl.coef * _sequence_kl(experience, self.kl.estimator)
        names = [r.prompt.uid for r in experience.rollouts]
        groups = np.unique(np.array(names), return_inverse=True)[1]
        per_sample = self.estimator(rewards, groups)
        return tuple(
            np.full(len(r.completion.token_ids), a, np.float32)
            for r, a in zip(experience.rollouts, per_sample, strict=True)
        )

    def token_loss(self, batch: MicroBatch, log_probs: Tensor) -> TokenLoss:
        """Surrogate and KL penalty of every token.

        Reads the fields ``advantages``, ``old_logprobs`` and ``ref_logprobs``; the last may be
        missing where :attr:`needs_reference` is False. Reports the means ``policy_loss``,
        ``ratio_mean``, ``clip_fraction`` and, where reference log-probs are there, ``kl`` (k3,
        whatever estimator is trained with), and the maximum ``ratio_max``.
        """
        mask = batch.loss_mask
        policy = policy_loss(
            log_probs,
            batch.fields["old_logprobs"],
            batch.fields["advantages"],
            mask,
            self.clip_low,
            self.clip_high,
        )
        means = {
            "policy_loss": policy.loss.detach(),
            "ratio_mean": torch.where(mask, policy.ratio, 0.0),
            "clip_fraction": policy.clipped.float(),
        }
        loss = policy.loss
        if self.needs_reference and self.kl.placement is KlPlacement.LOSS:
            ref = batch.fields["ref_logprobs"]
            loss = loss + self.kl.coef * kl_penalty(log_probs, ref, mask, self.kl.estimator)
        if "ref_logprobs" in batch.fields:
            ref = batch.fields["ref_logprobs"]
            means["kl"] = kl_penalty(log_probs.detach(), ref, mask, KlEstimator.K3)
        maxima = {"ratio_max": torch.where(mask, policy.ratio, 0.0)}
        return TokenLoss(loss=loss, means=means, maxima=maxima)


@dataclass(frozen=True, slots=True)
class Supervised:
    """Negative log-likelihood of the masked tokens."""

    def token_loss(self, batch: MicroBatch, log_probs: Tensor) -> TokenLoss:
        return TokenLoss(loss=sft_loss(log_probs, batch.loss_mask))


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that ``config`` names."""
    match config.name:
        case AlgorithmName.GRPO:
            estimator: AdvantageEstimator = partial(
                advantages.grpo, normalize_std=config.normalize_std
            )
        case AlgorithmName.RLOO:
            estimator = advantages.rloo
    kl = config.kl
    if kl.coef and kl.placement is KlPlacement.LOSS and kl.estimator is KlEstimator.K1:
        logger.warning(
            "algorithm.kl.estimator=k1 in the loss has zero gradient in expectation: the policy is "
            "not held near the reference; use k2 or k3, or algorithm.kl.placement=reward"
        )
    return PolicyGradient(
        estimator=estimator,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        loss_mean=config.loss_mean,
        epochs=config.epochs,
        mini_batches=config.mini_batches,
        kl=kl,
    )


def _sequence_kl(experience: Experience, estimator: KlEstimator) -> NDArray[np.float64]:
    """Sum over each completion's tokens of the per-token estimate [N]."""
    if experience.ref_logprobs is None:
        raise ValueError("the KL penalty needs reference log-probs, and the experience has none")
    sums = []
    for old, ref in zip(experience.old_logprobs, experience.ref_logprobs, strict=True):
        new, base = torch.tensor(old, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64)
        mask = torch.ones_like(new, dtype=torch.bool)
        sums.append(float(kl_penalty(new, base, mask, estimator).sum()))
    return np.array(sums, np.float64)
