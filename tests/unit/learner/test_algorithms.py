"""Algorithms: from an experience to advantages per token, and from log-probs to a token's loss."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hpc_rlhf.config import (
    AlgorithmConfig,
    AlgorithmName,
    CriticConfig,
    CriticKind,
    ImportanceWeight,
    KlConfig,
    KlEstimator,
    KlPlacement,
    LossMean,
    OffPolicyConfig,
    OverlongConfig,
    Proximal,
    Ratio,
)
from hpc_rlhf.learner.actor_critic import lesson_items
from hpc_rlhf.learner.algorithms import Algorithm, Outputs, make_algorithm
from hpc_rlhf.learner.objectives import Supervised
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


def _advantages(algorithm: Algorithm, experience: Experience) -> tuple[np.ndarray, ...]:
    return algorithm.lesson(experience).fields["advantages"]


def test_every_token_of_a_completion_has_its_samples_advantage() -> None:
    algorithm = make_algorithm(AlgorithmConfig(normalize_std=False))
    got = [a.tolist() for a in _advantages(algorithm, _experience())]
    assert got == [[-1.0], [-2.0, -2.0], [1.0, 1.0, 1.0], [2.0]]


def test_rloo_by_name() -> None:
    algorithm = make_algorithm(AlgorithmConfig(name=AlgorithmName.RLOO))
    got = [a[0] for a in _advantages(algorithm, _experience())]
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
    (batch.fields["weight"] * algorithm.token_loss(batch, Outputs(log_probs)).loss).sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.cat([w.grad for w in whole]))


def test_kl_in_the_reward_is_summed_over_the_completion() -> None:
    kl = KlConfig(coef=0.1, placement=KlPlacement.REWARD, estimator=KlEstimator.K1)
    algorithm = make_algorithm(AlgorithmConfig(normalize_std=False, kl=kl))
    # k1 = 0.5 a token: rewards 0.95, -0.1, 2.85, 3.95.
    got = [a[0] for a in _advantages(algorithm, _experience())]
    assert got == pytest.approx([-0.95, -2.025, 0.95, 2.025])
    with pytest.raises(ValueError, match="reference"):
        algorithm.lesson(_experience(with_reference=False))


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
    out = algorithm.token_loss(batch, Outputs(log_probs))
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
    out = make_algorithm(AlgorithmConfig()).token_loss(batch, Outputs(torch.zeros(1)))
    assert "kl" not in out.means


def test_supervised_loss_is_the_negative_log_likelihood() -> None:
    ((batch,),) = pack([completion_item(np.array([1, 2]), np.array([3]))], max_tokens=4)
    outputs = Outputs(torch.tensor([-5.0, -2.0]))
    assert Supervised().token_loss(batch, outputs).loss.tolist() == [0.0, 2.0]


def test_reinforce_plus_plus_takes_the_kl_off_the_tokens() -> None:
    kl = KlConfig(coef=0.1, placement=KlPlacement.REWARD, estimator=KlEstimator.K1)
    config = AlgorithmConfig(name=AlgorithmName.REINFORCE_PLUS_PLUS, kl=kl)
    got = _advantages(make_algorithm(config), _experience())
    # k1 = 0.5 a token: 0.95; -0.1, -0.05; 2.85, 2.9, 2.95; 3.95, then whitened.
    returns = np.array([0.95, -0.1, -0.05, 2.85, 2.9, 2.95, 3.95])
    expected = (returns - returns.mean()) / returns.std()
    assert np.concatenate(got).tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_ppo_rewards_the_last_token_and_learns_from_the_critic() -> None:
    """gamma = lambda = 1: a return is what is still to come, an advantage that less the value."""
    kl = KlConfig(coef=0.1, placement=KlPlacement.REWARD, estimator=KlEstimator.K1)
    config = AlgorithmConfig(name=AlgorithmName.PPO, kl=kl, lam=1.0)
    algorithm = make_algorithm(config)
    with pytest.raises(ValueError, match="values"):
        algorithm.lesson(_experience())
    values = tuple(
        np.full(n, v, np.float32) for n, v in zip((1, 2, 3, 1), (1, 0, 2, 4), strict=True)
    )
    lesson = algorithm.lesson(replace(_experience(), values=values))
    # k1 = 0.5 a token, 0.05 off its reward.
    returns = [0.95, -0.1, -0.05, 2.85, 2.9, 2.95, 3.95]
    assert np.concatenate(lesson.fields["returns"]).tolist() == pytest.approx(returns, abs=1e-6)
    estimates = np.array(returns) - np.concatenate(values)
    expected = (estimates - estimates.mean()) / estimates.std()
    assert np.concatenate(lesson.fields["advantages"]).tolist() == pytest.approx(
        expected.tolist(), abs=1e-5
    )
    assert lesson.fields["old_values"] is values
    assert 0.7 < lesson.metrics["explained_variance"] < 1.0


def test_a_shared_critic_adds_its_loss_and_a_separate_one_does_not() -> None:
    item = completion_item(
        np.array([1]),
        np.array([3, 4]),
        advantages=np.array([1.0, -1.0], np.float32),
        old_logprobs=np.array([-1.0, -1.0], np.float32),
        returns=np.array([2.0, 0.0], np.float32),
        old_values=np.array([0.0, 1.0], np.float32),
    )
    ((batch,),) = pack([item], max_tokens=4)
    outputs = Outputs(torch.full((2,), -1.0), scores=torch.tensor([1.0, 1.0]))
    ppo = AlgorithmConfig(name=AlgorithmName.PPO)
    critic = CriticConfig(kind=CriticKind.SHARED, coef=0.1, clip=0.0)
    shared = make_algorithm(ppo, critic).token_loss(batch, outputs)
    assert shared.loss.tolist() == pytest.approx([-1.0 + 0.1 * 0.5, 1.0 + 0.1 * 0.5])
    assert shared.means["value_loss"].tolist() == [0.5, 0.5]
    assert shared.means["value"].tolist() == [1.0, 1.0]
    separate = make_algorithm(ppo, replace(critic, kind=CriticKind.SEPARATE))
    assert separate.token_loss(batch, outputs).loss.tolist() == [-1.0, 1.0]
    assert separate.critic is not None
    assert separate.critic.token_loss(batch, outputs).loss.tolist() == [0.5, 0.5]
    assert make_algorithm(AlgorithmConfig()).critic is None


def test_overlong_completions_are_punished_and_cut_ones_dropped() -> None:
    """Of at most 4 tokens, the last 2 cost 0.5 each: completions of 1, 2, 3 and 1."""
    overlong = OverlongConfig(buffer_fraction=0.5, penalty=1.0, drop_truncated=True)
    algorithm = make_algorithm(
        AlgorithmConfig(normalize_std=False, overlong=overlong), max_new_tokens=4
    )
    batch = _experience()
    cut = replace(batch.rollouts[2].completion, finish_reason="length")
    rollouts = list(batch.rollouts)
    rollouts[2] = replace(rollouts[2], completion=cut)
    lesson = algorithm.lesson(replace(batch, rollouts=tuple(rollouts)))
    assert [float(a[0]) for a in lesson.fields["advantages"]] == [-0.75, -2.0, 0.75, 2.0]
    assert [m.tolist() for m in lesson.learned] == [[True], [True] * 2, [False] * 3, [True]]
    assert lesson.metrics["reward/overlong"] == -0.125
    assert lesson.metrics["rejected_fraction"] == 0.0  # cut is not rejected


def test_old_policy_is_the_samplers_if_asked_for() -> None:
    batch = replace(
        _experience(), old_logprobs=tuple(np.full(n, -2.0, np.float32) for n in (1, 2, 3, 1))
    )
    for proximal, expected in ((Proximal.LEARNER, -2.0), (Proximal.SAMPLER, -1.0)):
        config = AlgorithmConfig(off_policy=OffPolicyConfig(proximal=proximal))
        lesson = make_algorithm(config).lesson(batch)
        assert {float(x) for row in lesson.fields["old_logprobs"] for x in row} == {expected}


def test_weights_and_masks_are_separate() -> None:
    """A ratio of 1/e everywhere: weighed by 1/e, and with bounds rejected, one or the other."""
    batch = replace(
        _experience(), old_logprobs=tuple(np.full(n, -2.0, np.float32) for n in (1, 2, 3, 1))
    )
    weighs = OffPolicyConfig(weight=ImportanceWeight.TOKEN)
    lesson = make_algorithm(AlgorithmConfig(off_policy=weighs)).lesson(batch)
    assert all(mask.all() for mask in lesson.learned)
    assert lesson.metrics["importance_mean"] == pytest.approx(math.exp(-1))
    rejects = OffPolicyConfig(sequence_bounds=[0.2, 2.0])  # 1/e passes, its powers do not
    lesson = make_algorithm(AlgorithmConfig(off_policy=rejects)).lesson(batch)
    assert [bool(mask.all()) for mask in lesson.learned] == [True, False, False, True]
    assert lesson.metrics["rejected_fraction"] == pytest.approx(5 / 7)
    assert "importance" not in lesson.fields


def test_the_mean_is_over_what_is_learned_from() -> None:
    """A rejected token or completion counts neither above nor below the line."""
    batch = _experience()
    lesson = make_algorithm(AlgorithmConfig()).lesson(batch)
    masks = ([True], [False, False], [True, False, True], [True])
    lesson = replace(lesson, learned=tuple(np.array(m) for m in masks))
    items, names = lesson_items(lesson, batch.rollouts, range(4), LossMean.TOKEN, None)
    assert names == ["a#0", "a#1", "b#1"]
    assert sum(float(item.fields["weight"].sum()) for item in items) == pytest.approx(1.0)
    assert items[1].fields["weight"].tolist() == [0.0, 0.25, 0.0, 0.25]
    items, _ = lesson_items(lesson, batch.rollouts, range(4), LossMean.SEQUENCE, None)
    sums = [float(item.fields["weight"].sum()) for item in items]
    assert sums == pytest.approx([1 / 3] * 3)


def test_another_coefficient_of_the_kl() -> None:
    algorithm = make_algorithm(AlgorithmConfig(kl=KlConfig(coef=0.1)))
    assert algorithm.needs_reference
    assert algorithm.with_kl_coef(0.2).surrogate.kl == KlConfig(coef=0.2)
    assert not make_algorithm(AlgorithmConfig()).needs_reference


def test_what_is_rarely_meant_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    kl = KlConfig(coef=0.1, placement=KlPlacement.LOSS, estimator=KlEstimator.K1)
    with caplog.at_level(logging.WARNING):
        make_algorithm(AlgorithmConfig(kl=kl))
        make_algorithm(AlgorithmConfig(ratio=Ratio.SEQUENCE, loss_mean=LossMean.TOKEN))
    assert "zero gradient in expectation" in caplog.text
    assert "weighs a completion by its length" in caplog.text
