"""Algorithms: from an experience to advantages per token, and from log-probs to a token's loss."""

import logging
import math

import numpy as np
import pytest
import torch

from hpc_rlhf.config import (
    AlgorithmConfig,
    AlgorithmName,
    KlConfig,
    KlEstimator,
    KlPlacement,
)
from hpc_rlhf.learner.algorithms import Supervised, make_algorithm
from hpc_rlhf.learner.packing import completion_item, pack
from hpc_rlhf.types import Completion, Experience, Prompt, Rollout, VersionSpan


def _rollout(uid: str, sample: int, tokens: int) -> Rollout:
    return Rollout(
        prompt=Prompt(uid=uid, token_ids=np.array([1, 2], np.int32)),
        sample_index=sample,
        step=0,
        completion=Completion(
            token_ids=np.arange(3, 3 + tokens, dtype=np.int32),
            logprobs=np.full(tokens, -1.0, np.float32),
            finish_reason="stop",
            versions=(VersionSpan(version=0, start=0, end=tokens),),
            seed=sample,
        ),
    )


def _experience(*, with_reference: bool = True) -> Experience:
    """Two prompts of two samples; completions of 1, 2, 3, 1 tokens, interleaved."""
    lengths = [1, 2, 3, 1]
    return Experience(
        rollouts=tuple(
            _rollout(uid, s, n) for uid, s, n in zip("abab", [0, 0, 1, 1], lengths, strict=True)
        ),
        rewards=np.array([1.0, 0.0, 3.0, 4.0], np.float32),
        old_logprobs=tuple(np.full(n, -1.0, np.float32) for n in lengths),
        ref_logprobs=tuple(np.full(n, -1.5, np.float32) for n in lengths)
        if with_reference
        else None,
    )


def test_every_token_of_a_completion_has_its_samples_advantage() -> None:
    algorithm = make_algorithm(AlgorithmConfig(normalize_std=False))
    got = [a.tolist() for a in algorithm.advantages(_experience())]
    assert got == [[-1.0], [-2.0, -2.0], [1.0, 1.0, 1.0], [2.0]]


def test_rloo_by_name() -> None:
    algorithm = make_algorithm(AlgorithmConfig(name=AlgorithmName.RLOO))
    got = [a[0] for a in algorithm.advantages(_experience())]
    assert got == [-2.0, -4.0, 2.0, 4.0]


def test_first_gradient_is_that_of_trls_ratio_of_whole_completions() -> None:
    """TRL 1.16's RLOOTrainer: mean over completions of -exp(sum of log-ratios) * advantage."""
    lengths, advantages = [3, 5], [0.7, -1.2]
    old = [-torch.rand(n, generator=torch.Generator().manual_seed(n)) for n in lengths]
    whole = [lp.clone().requires_grad_() for lp in old]
    ratios = torch.stack([(w - o).sum().exp() for w, o in zip(whole, old, strict=True)])
    (-ratios * torch.tensor(advantages)).mean().backward()

    algorithm = make_algorithm(AlgorithmConfig(name=AlgorithmName.RLOO))
    items = [
        completion_item(
            np.array([9]),
            np.arange(n),
            advantages=np.full(n, a, np.float32),
            old_logprobs=lp.numpy(),
            weight=np.full(n, 0.5, np.float32),  # sum over tokens, mean over two completions
        )
        for n, a, lp in zip(lengths, advantages, old, strict=True)
    ]
    ((batch,),) = pack(items, max_tokens=8)
    log_probs = torch.cat(old).requires_grad_()
    (batch.fields["weight"] * algorithm.token_loss(batch, log_probs).loss).sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.cat([w.grad for w in whole]))


def test_kl_in_the_reward_is_summed_over_the_completion() -> None:
    kl = KlConfig(coef=0.1, placement=KlPlacement.REWARD, estimator=KlEstimator.K1)
    algorithm = make_algorithm(AlgorithmConfig(normalize_std=False, kl=kl))
    # k1 = 0.5 a token: rewards 0.95, -0.1, 2.85, 3.95.
    got = [a[0] for a in algorithm.advantages(_experience())]
    assert got == pytest.approx([-0.95, -2.025, 0.95, 2.025])
    with pytest.raises(ValueError, match="reference"):
        algorithm.advantages(_experience(with_reference=False))


def test_loss_of_a_token() -> None:
    kl = KlConfig(coef=0.5, placement=KlPlacement.LOSS, estimator=KlEstimator.K2)
    algorithm = make_algorithm(AlgorithmConfig(kl=kl))
    item = completion_item(
        np.array([1, 2]),
        np.array([3, 4]),
        advantages=np.array([1.0, -1.0], np.float32),
        old_logprobs=np.array([-1.0, -1.0], np.float32),
        ref_logprobs=np.array([-1.0, -2.0], np.float32),
    )
    ((batch,),) = pack([item], max_tokens=4, pad_multiple=4)
    log_probs = torch.tensor([-9.0, -1.0, -1.0 + math.log(1.5), -9.0])
    out = algorithm.token_loss(batch, log_probs)
    d = -1.0 - math.log(1.5)
    assert out.loss.tolist() == pytest.approx([0.0, -1.0, 1.5 + 0.5 * 0.5 * d**2, 0.0])
    assert out.means["policy_loss"].tolist() == pytest.approx([0.0, -1.0, 1.5, 0.0])
    assert out.means["kl"].tolist() == pytest.approx([0.0, 0.0, math.exp(d) - d - 1, 0.0])
    assert out.means["ratio_mean"].tolist() == pytest.approx([0.0, 1.0, 1.5, 0.0])
    assert out.maxima["ratio_max"].tolist() == pytest.approx([0.0, 1.0, 1.5, 0.0])
    assert out.means["clip_fraction"].tolist() == [0.0] * 4  # A < 0 is not clipped above


def test_without_a_reference_no_kl_is_reported() -> None:
    item = completion_item(
        np.array([1]),
        np.array([2]),
        advantages=np.ones(1, np.float32),
        old_logprobs=np.zeros(1, np.float32),
    )
    ((batch,),) = pack([item], max_tokens=4)
    out = make_algorithm(AlgorithmConfig()).token_loss(batch, torch.zeros(1))
    assert "kl" not in out.means


def test_supervised_loss_is_the_negative_log_likelihood() -> None:
    ((batch,),) = pack([completion_item(np.array([1, 2]), np.array([3]))], max_tokens=4)
    assert Supervised().token_loss(batch, torch.tensor([-5.0, -2.0])).loss.tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("kl", "epochs", "mini_batches", "expected"),
    [
        (KlConfig(), 1, 1, False),
        (KlConfig(), 2, 1, True),
        (KlConfig(), 1, 4, True),
        (KlConfig(coef=0.1, placement=KlPlacement.LOSS), 1, 1, False),
        (KlConfig(coef=0.1, placement=KlPlacement.REWARD), 1, 1, True),
    ],
)
def test_when_old_logprobs_matter(
    kl: KlConfig, epochs: int, mini_batches: int, expected: bool
) -> None:
    algorithm = make_algorithm(AlgorithmConfig(kl=kl))
    assert algorithm.needs_old_logprobs(epochs, mini_batches) is expected
    assert algorithm.needs_reference is (kl.coef != 0)


def test_k1_in_the_loss_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    kl = KlConfig(coef=0.1, placement=KlPlacement.LOSS, estimator=KlEstimator.K1)
    with caplog.at_level(logging.WARNING):
        make_algorithm(AlgorithmConfig(kl=kl))
    assert "zero gradient in expectation" in caplog.text
