"""Losses against numbers worked by hand and against TRL's formulas."""

import math

import numpy as np
import pytest
import torch

from hpc_rlhf.config import KlEstimator, LossMean
from hpc_rlhf.learner.losses import (
    kl_penalty,
    policy_loss,
    sequence_log_ratios,
    sequence_weights,
    sft_loss,
    value_loss,
)

ALL = torch.ones(4, dtype=torch.bool)


def test_clipped_surrogate_by_hand() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0])
    out = policy_loss(ratio.log(), torch.zeros(4), advantages, ALL, 0.2, 0.3)
    # -min(rA, clip(r)A): clipped above at 1.3; not clipped; not clipped; clipped below at 0.8.
    assert out.loss.tolist() == pytest.approx([-2.6, 3.0, -1.0, 1.6])
    assert out.ratio.tolist() == pytest.approx([1.5, 1.5, 0.5, 0.5])
    assert out.clipped.tolist() == [True, False, False, True]


def test_clipping_removes_the_gradient_and_unit_ratio_gives_reinforce() -> None:
    log_probs = torch.tensor([0.0, math.log(1.5)], requires_grad=True)
    loss = policy_loss(log_probs, torch.zeros(2), torch.tensor([3.0, 3.0]), ALL[:2], 0.2, 0.2).loss
    loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-3.0, 0.0])


def test_sequence_ratio_is_the_geometric_mean_over_learned_tokens() -> None:
    """Two sequences and a padding segment; one token of the first is not learned from."""
    mask = torch.tensor([False, True, True, True, True, False, False])
    log_ratio = torch.tensor([0.0, 0.3, -0.1, 0.5, 0.0, 0.0, 0.0], requires_grad=True)
    got = sequence_log_ratios(log_ratio, mask, torch.tensor([0, 3, 6, 7], dtype=torch.int32))
    assert got.tolist() == pytest.approx([0.0, 0.1, 0.1, 0.25, 0.25, 0.0, 0.0])
    got.sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_masked_positions_carry_neither_loss_nor_gradient_even_when_not_finite() -> None:
    log_probs = torch.tensor([-1.0, -math.inf, math.nan, 800.0], requires_grad=True)
    mask = torch.tensor([True, False, False, False])
    advantages = torch.tensor([1.0, math.nan, 1.0, 1.0])
    out = policy_loss(log_probs, torch.tensor([-1.0, 0.0, 0.0, 0.0]), advantages, mask, 0.2, 0.2)
    kl = kl_penalty(log_probs, torch.zeros(4), mask, KlEstimator.K3)
    total = out.loss + kl + sft_loss(log_probs, mask)
    assert total.tolist()[1:] == [0.0, 0.0, 0.0]
    assert out.ratio.tolist() == [1.0] * 4
    total.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist()[1:] == [0.0, 0.0, 0.0]
    assert math.isfinite(log_probs.grad[0].item())


def test_kl_estimators_by_hand() -> None:
    new, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    mask = ALL[:2]
    k1 = kl_penalty(new, ref, mask, KlEstimator.K1)
    k2 = kl_penalty(new, ref, mask, KlEstimator.K2)
    k3 = kl_penalty(new, ref, mask, KlEstimator.K3)
    assert k1.tolist() == pytest.approx([0.5, -1.0])
    assert k2.tolist() == pytest.approx([0.125, 0.5])
    assert k3.tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1, math.e - 2])


@pytest.mark.parametrize("estimator", [KlEstimator.K1, KlEstimator.K3])
def test_kl_estimators_are_unbiased(estimator: KlEstimator) -> None:
    """The mean over the policy's own distribution is the exact KL (k2 is biased)."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    estimates = kl_penalty(p.log(), q.log(), ALL[:3], estimator)
    assert (p * estimates).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


def test_clipped_value_loss_by_hand() -> None:
    """Old value 1, clip 0.5, return 3: inside, clipped where that helps, not where it hurts."""
    values = torch.tensor([1.2, 2.5, -2.0, 9.0], requires_grad=True)
    mask = torch.tensor([True, True, True, False])
    returns = torch.tensor([3.0, 3.0, 3.0, torch.nan])
    out = value_loss(values, torch.ones(4), returns, mask, 0.5)
    # (1.2 - 3)^2 / 2; max(0.5^2, (1.5 - 3)^2) / 2; max((-5)^2, (0.5 - 3)^2) / 2
    assert out.loss.tolist() == pytest.approx([1.62, 1.125, 12.5, 0.0])
    assert out.clipped.tolist() == [False, True, False, False]
    out.loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-1.8, 0.0, -5.0, 0.0])
    plain = value_loss(values.detach(), torch.ones(4), returns, mask, 0.0)
    assert plain.loss.tolist() == pytest.approx([1.62, 0.125, 12.5, 0.0])
    assert not plain.clipped.any()


def test_weights_by_hand() -> None:
    token = sequence_weights([1, 3], LossMean.TOKEN, 8)
    sequence = sequence_weights([1, 3], LossMean.SEQUENCE, 8)
    constant = sequence_weights([1, 3], LossMean.CONSTANT, 8)
    assert token.tolist() == pytest.approx([1 / 4, 1 / 4])
    assert sequence.tolist() == pytest.approx([1 / 2, 1 / 6])
    assert constant.tolist() == pytest.approx([1 / 16, 1 / 16])


def test_empty_sequences_weigh_nothing_but_count() -> None:
    assert sequence_weights([0, 2], LossMean.SEQUENCE, 8).tolist() == pytest.approx([0.0, 1 / 4])
    assert sequence_weights([0, 0], LossMean.TOKEN, 8).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("loss_mean", list(LossMean))
def test_weighted_sum_is_trls_mean(loss_mean: LossMean) -> None:
    """TRL's GRPOTrainer._compute_loss: loss_type "dapo", "grpo" and "dr_grpo" on padded tensors."""
    generator = torch.Generator().manual_seed(0)
    lengths, width = [5, 2, 7, 1], 7
    shape = (len(lengths), width)
    new, old, ref = (-torch.rand(shape, generator=generator) * 3 for _ in range(3))
    advantages = torch.randn((len(lengths), 1), generator=generator)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]

    coef_1 = torch.exp(new - old)
    coef_2 = torch.clamp(coef_1, 1 - 0.2, 1 + 0.3)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    per_token_loss = per_token_loss + 0.1 * (torch.exp(ref - new) - (ref - new) - 1)
    trl = {
        LossMean.SEQUENCE: ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(),
        LossMean.CONSTANT: (per_token_loss * mask).sum() / (per_token_loss.size(0) * 11),
        LossMean.TOKEN: (per_token_loss * mask).sum() / mask.sum(),
    }[loss_mean]

    weights = torch.from_numpy(sequence_weights(lengths, loss_mean, 11)).float()
    ours = policy_loss(new, old, advantages.expand(shape), mask, 0.2, 0.3).loss
    ours = ours + 0.1 * kl_penalty(new, ref, mask, KlEstimator.K3)
    assert (weights[:, None] * ours * mask).sum().item() == pytest.approx(trl.item(), rel=1e-6)


def test_sft_loss_is_cross_entropy() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    targets, mask = torch.tensor([0, 3, 4]), torch.tensor([True, False, True])
    log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    expected = torch.nn.functional.cross_entropy(logits[mask], targets[mask]).item()
    weights = sequence_weights([int(mask.sum())], LossMean.TOKEN, 1)
    assert (weights[0] * sft_loss(log_probs, mask).sum()).item() == pytest.approx(
        expected, rel=1e-6
    )
    assert np.isclose(weights[0], 0.5)
