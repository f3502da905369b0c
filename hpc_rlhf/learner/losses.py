"""Losses per token or pair, and the weights that make one number of them. Pure functions.

A mini-batch loss is ``sum(weight * token_loss)`` with weights computed once from the lengths of the
*whole* mini-batch (:func:`sequence_weights`). The sum over any split of the tokens into
micro-batches and ranks is therefore the same loss, with the same gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from hpc_rlhf.config import DpoLoss, KlEstimator, LossMean


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Clipped surrogate of every token; zeros (ratio: ones) where the mask is False."""

    loss: Tensor  # float32 [T]
    ratio: Tensor  # float32 [T], new over old probability, of the token or of its sequence
    clipped: Tensor  # bool [T], tokens whose gradient the clipping removed


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Squared error of every value; zeros where the mask is False."""

    loss: Tensor  # float32 [T]
    clipped: Tensor  # bool [T], tokens whose gradient the clipping removed


def sequence_weights(
    lengths: Sequence[int], loss_mean: LossMean, max_new_tokens: int | None = None
) -> NDArray[np.float64]:
    """Weight of each token of each sequence, so that the weighted sum is the named mean.

    * ``TOKEN``: ``1 / sum(lengths)`` (DAPO's token-level loss; TRL's ``dapo``).
    * ``SEQUENCE``: ``1 / (N * length_i)`` (DeepSeekMath's GRPO, arXiv:2402.03300; TRL's ``grpo``).
    * ``CONSTANT``: ``1 / (N * max_new_tokens)`` (Dr. GRPO, arXiv:2503.20783; TRL's ``dr_grpo``).

    Args:
        lengths: learned tokens of each of the N sequences of the mini-batch, over all ranks.

    Returns:
        float64 [N]; 0 for sequences of no tokens, which still count in N.

    Raises:
        ValueError: ``CONSTANT`` without ``max_new_tokens``.
    """
    n = np.asarray(lengths, np.float64)
    if n.sum() == 0:
        return np.zeros(len(n))
    match loss_mean:
        case LossMean.TOKEN:
            weights = np.full(len(n), 1.0 / n.sum())
        case LossMean.SEQUENCE:
            weights = 1.0 / (len(n) * np.maximum(n, 1.0))
        case LossMean.CONSTANT:
            if max_new_tokens is None:
                raise ValueError("LossMean.CONSTANT divides by max_new_tokens, which is not given")
            weights = np.full(len(n), 1.0 / (len(n) * max_new_tokens))
    return np.where(n > 0, weights, 0.0)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    *,
    cu_seqlens: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, negated: ``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    Schulman et al., arXiv:1707.06347, eq. 7, with DAPO's separate upper bound (arXiv:2503.14476,
    eq. 10). The gradient flows through ``log_probs`` only.

    Args:
        log_probs: [T] of the policy being trained.
        old_log_probs: [T] of the policy before this update.
        advantages: [T].
        mask: bool [T].
        cu_seqlens: bounds of the sequences; if given, r is the sequence's ratio, see
            :func:`sequence_log_ratios`, else the token's.
    """
    # Where before exp: garbage on masked positions must reach neither the loss nor, as 0 * inf, the
    # gradient.
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
    if cu_seqlens is not None:
        log_ratio = sequence_log_ratios(log_ratio, mask, cu_seqlens)
    advantages = torch.where(mask, advantages, 0.0)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped = ((ratio < 1.0 - clip_low) & (advantages < 0)) | (
        (ratio > 1.0 + clip_high) & (advantages > 0)
    )
    return PolicyLoss(loss=loss, ratio=ratio.detach(), clipped=clipped)


def sequence_log_ratios(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Log of GSPO's sequence-level ratio on every token [T], 0 where the mask is False.

    In value the mean of the sequence's token log-ratios (Zheng et al., arXiv:2507.18071, eq. 7); in
    gradient the token's own (GSPO-token, eq. 14). With one advantage a sequence and
    ``LossMean.SEQUENCE`` the gradient is GSPO's (eq. 5), and it is defined for any other.

    Args:
        log_ratio: [T], 0 where the mask is False.
        mask: bool [T].
        cu_seqlens: [S + 1], from 0 to T, on the CPU.
    """
    lengths = cu_seqlens.diff().to(log_ratio.device)
    # In float64, so that the mean does not depend on where in a micro-batch a sequence lies.
    values = torch.stack((log_ratio.detach().double(), mask.double()), dim=1)
    sums = torch.segment_reduce(values, "sum", lengths=lengths, axis=0)
    means = (sums[:, 0] / sums[:, 1].clamp(min=1.0)).to(log_ratio.dtype)
    spread = means.repeat_interleave(lengths, output_size=len(log_ratio))
    return torch.where(mask, spread + (log_ratio - log_ratio.detach()), 0.0)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float
) -> ValueLoss:
    """Half the squared error of a critic, clipped as PPO's surrogate is.

    ``max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2``, as in OpenAI's baselines
    and TRL's PPO; with ``clip`` 0 simply ``(V - R)^2 / 2``. The gradient flows through ``values``.

    Args:
        values: [T] of the critic being trained.
        old_values: [T] of the critic before this update.
        returns: [T].
        mask: bool [T].
    """
    # Where before the square: garbage on masked positions must not reach the gradient.
    error = torch.where(mask, values - returns, 0.0)
    squared = error.square()
    if clip == 0:
        return ValueLoss(loss=0.5 * squared, clipped=torch.zeros_like(mask))
    near = old_values + (values - old_values).clamp(-clip, clip)
    bounded = torch.where(mask, near - returns, 0.0).square()
    return ValueLoss(loss=0.5 * torch.maximum(squared, bounded), clipped=bounded > squared)


def kl_penalty(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, estimator: KlEstimator
) -> Tensor:
    """Per-token estimate [T] of KL(policy || reference) on tokens sampled from the policy.

    Schulman, "Approximating KL Divergence" (2020), with ``d = log p_ref - log p``:
    k1 ``-d``, k2 ``d^2 / 2``, k3 ``exp(d) - d - 1``.

    As a *loss* only k2 and k3 pull towards the reference (k2 with the gradient of the reverse KL,
    on policy); the gradient of k1 is the bare score function, zero in expectation.
    """
    d = torch.where(mask, ref_log_probs - log_probs, 0.0)
    match estimator:
        case KlEstimator.K1:
            return -d
        case KlEstimator.K2:
            return 0.5 * d.square()
        case KlEstimator.K3:
            return d.exp() - d - 1.0


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor, centering: float = 0.0
) -> Tensor:
    """Negative log-likelihood of the preference of every pair [N].

    ``-log sigmoid(chosen - rejected - margin) + centering * (chosen + rejected)^2``: Bradley and
    Terry (1952), with the margin of Llama 2 (arXiv:2307.09288, eq. 2) and the penalty that keeps
    scores around 0 of Eisenstein et al. (arXiv:2312.09244). Without the latter only differences of
    scores matter.

    Args:
        chosen: scores [N] of the better ones.
        rejected: scores [N].
        margin: [N].
    """
    loss = -logsigmoid(chosen - rejected - margin)
    return loss + centering * (chosen + rejected).square() if centering else loss


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    kind: DpoLoss,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of every pair [N], of log-ratios ``log policy(y|x) - log reference(y|x)``.

    With ``h = chosen - rejected``:

    * ``SIGMOID``: ``-log sigmoid(beta h)``, Rafailov et al., arXiv:2305.18290, eq. 7.
    * ``CONSERVATIVE``: ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`` for labels that are
      wrong with probability ``e``, Mitchell, "A note on DPO with noisy preferences" (2023).
    * ``IPO``: ``(h - 1 / (2 beta))^2``, Azar et al., arXiv:2310.12036, eq. 17, where the log-ratios
      are to be means over the tokens of an answer, as the authors do and TRL does.

    Args:
        chosen: log-ratios [N] of whole answers (of IPO: their means over tokens).
        rejected: likewise.
    """
    h = chosen - rejected
    match kind:
        case DpoLoss.SIGMOID:
            return -logsigmoid(beta * h)
        case DpoLoss.CONSERVATIVE:
            return -(1.0 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(
                -beta * h
            )
        case DpoLoss.IPO:
            return (h - 1.0 / (2.0 * beta)).square()


def sft_loss(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood per token [T], 0 where the mask is False."""
    return torch.where(mask, -log_probs, 0.0)
