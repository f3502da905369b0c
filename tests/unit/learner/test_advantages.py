"""Group-relative advantages against numbers worked by hand and TRL's formulas."""

import numpy as np
import pytest
import torch

from hpc_rlhf.learner.advantages import (
    explained_variance,
    gae,
    grpo,
    reinforce_plus_plus,
    rloo,
    whiten,
)

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 5.0, 3.0], np.float32)
GROUPS = np.array([7, 7, 7, 7, 2, 2])


def test_grpo_without_std_by_hand() -> None:
    got = grpo(REWARDS, GROUPS, normalize_std=False)
    assert got.tolist() == [0.5, -0.5, -0.5, 0.5, 1.0, -1.0]
    assert got.dtype == np.float32


def test_grpo_with_std_by_hand() -> None:
    got = grpo(REWARDS, GROUPS, normalize_std=True)
    first = 0.5 / (np.sqrt(1 / 3) + 1e-4)  # sample variance of 1, 0, 0, 1 is 1/3
    second = 1.0 / (np.sqrt(2.0) + 1e-4)
    assert got.tolist() == pytest.approx([first, -first, -first, first, second, -second])


def test_rloo_by_hand() -> None:
    got = rloo(REWARDS, GROUPS)
    third = 1 / 3
    assert got.tolist() == pytest.approx([1 - third, -2 * third, -2 * third, 1 - third, 2.0, -2.0])


@pytest.mark.parametrize("rewards", [[4.0], [0.1, 0.1, 0.1]])
def test_nothing_to_learn_from_one_sample_or_equal_rewards(rewards: list[float]) -> None:
    r, g = np.array(rewards, np.float32), np.zeros(len(rewards), np.int64)
    zeros = [0.0] * len(rewards)
    assert grpo(r, g, normalize_std=True).tolist() == zeros
    assert grpo(r, g, normalize_std=False).tolist() == zeros
    assert rloo(r, g).tolist() == zeros


def test_groups_need_not_be_contiguous_or_equal_in_size() -> None:
    order = np.array([4, 0, 1, 5, 3, 2])
    for estimate in (lambda r, g: grpo(r, g, normalize_std=True), rloo):
        whole = estimate(REWARDS, GROUPS)
        assert estimate(REWARDS[order], GROUPS[order]).tolist() == whole[order].tolist()


def test_against_trl() -> None:
    """TRL 1.16's GRPOTrainer and RLOOTrainer, `_generate_and_score_completions`, groups of 4.

    Its `nanstd` is the sample standard deviation, as torch.std is.
    """
    grouped = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    mean = grouped.mean(1, keepdim=True)
    expected_grpo = (grouped - mean) / (grouped.std(1, keepdim=True) + 1e-4)
    baselines = (grouped.sum(1, keepdim=True) - grouped) / 3
    rewards, groups = grouped.flatten().numpy(), np.repeat(np.arange(5), 4)
    np.testing.assert_allclose(
        grpo(rewards, groups, normalize_std=True), expected_grpo.flatten().numpy(), atol=1e-6
    )
    np.testing.assert_allclose(
        rloo(rewards, groups), (grouped - baselines).flatten().numpy(), atol=1e-6
    )


def test_reinforce_plus_plus_by_hand() -> None:
    """Returns 1 - 0.3, 1 - 0.2 and 0 - (-0.1): penalties of the tokens still to come."""
    rewards, groups = np.array([1.0, 0.0]), np.array([0, 1])
    penalties = (np.array([0.1, 0.2]), np.array([-0.1]))
    first, second = reinforce_plus_plus(rewards, penalties, groups, group_baseline=False)
    returns = np.array([0.7, 0.8, 0.1])
    expected = (returns - 1.6 / 3) / np.sqrt(0.28667 / 3)  # sum of squares 1.14 - 1.6^2 / 3
    assert [*first, *second] == pytest.approx(expected.tolist(), rel=1e-4)
    assert first.dtype == np.float32


def test_reinforce_plus_plus_with_baseline_by_hand() -> None:
    """Group means 2 and 10 go; -1, 1, 1 (two tokens), 0 are whitened over the tokens."""
    rewards, groups = np.array([1.0, 3.0, 10.0]), np.array([0, 0, 1])
    penalties = (np.zeros(1), np.zeros(2), np.zeros(1))
    got = reinforce_plus_plus(rewards, penalties, groups, group_baseline=True)
    std = np.sqrt((1 + 1 + 1 + 0) / 4 - 0.25**2)
    expected = [[-1.25 / std], [0.75 / std] * 2, [-0.25 / std]]
    assert [a.tolist() for a in got] == [pytest.approx(row, rel=1e-6) for row in expected]


# gamma 0.5, lambda 0.5, worked backwards from the last token:
# t   r     V    delta = r + V'/2 - V       A = delta + A'/4          return = A + V
# 2   4.0   2.0  4 + 0   - 2    =  2        2                         4
# 1   0.0   3.0  0 + 1   - 3    = -2        -2   + 0.5   = -1.5       1.5
# 0  -1.0   1.0  -1 + 1.5 - 1   = -0.5      -0.5 - 0.375 = -0.875     0.125
GAE_TABLE = {
    "rewards": [-1.0, 0.0, 4.0],
    "values": [1.0, 3.0, 2.0],
    "advantages": [-0.875, -1.5, 2.0],
    "returns": [0.125, 1.5, 4.0],
}


def test_gae_against_the_table_worked_by_hand() -> None:
    """Beside a shorter completion and one without a token, which must not matter."""
    rewards = [np.array([7.0]), np.array(GAE_TABLE["rewards"]), np.zeros(0)]
    values = [np.array([6.5]), np.array(GAE_TABLE["values"]), np.zeros(0)]
    advantages, returns = gae(rewards, values, gamma=0.5, lam=0.5)
    assert [a.tolist() for a in advantages] == [[0.5], GAE_TABLE["advantages"], []]
    assert [r.tolist() for r in returns] == [[7.0], GAE_TABLE["returns"], []]
    assert advantages[1].dtype == returns[1].dtype == np.float32


def test_gae_between_its_two_extremes() -> None:
    """lambda 0 is the temporal difference, lambda 1 the return less the value."""
    rng = np.random.default_rng(0)
    rewards, values = [rng.random(5)], [rng.random(5)]
    (one_step,), _ = gae(rewards, values, gamma=0.9, lam=0.0)
    following = np.append(values[0][1:], 0.0)
    np.testing.assert_allclose(one_step, rewards[0] + 0.9 * following - values[0], atol=1e-6)
    (whole,), (returns,) = gae(rewards, values, gamma=0.9, lam=1.0)
    discounted = [sum(0.9 ** (s - t) * rewards[0][s] for s in range(t, 5)) for t in range(5)]
    np.testing.assert_allclose(returns, discounted, atol=1e-6)
    np.testing.assert_allclose(whole, discounted - values[0], atol=1e-6)


def test_explained_variance() -> None:
    returns = [np.array([1.0, 3.0]), np.array([2.0])]
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns, [np.zeros(2), np.zeros(1)]) == 0.0
    assert explained_variance(returns, [np.array([3.0, 1.0]), np.array([2.0])]) == pytest.approx(-3)
    assert explained_variance([np.ones(2)], [np.zeros(2)]) == 0.0


def test_whitening_is_over_all_tokens_and_leaves_equal_ones_at_zero() -> None:
    flat = np.concatenate(whiten([np.array([1.0, 5.0, 2.0]), np.zeros(0), np.array([8.0])]))
    assert flat.mean() == pytest.approx(0.0, abs=1e-6)
    assert flat.std() == pytest.approx(1.0, abs=1e-6)
    assert [w.tolist() for w in whiten([np.full(2, 0.1), np.full(1, 0.1)])] == [[0.0, 0.0], [0.0]]
    assert whiten([]) == ()


def test_excluded_rewards_must_have_been_left_out() -> None:
    with pytest.raises(ValueError, match="finite"):
        rloo(np.array([1.0, np.nan]), np.array([0, 0]))
