"""Importance weights, rejection and the mismatch of sampler and learner, by hand."""

import math

import numpy as np
import pytest

from hpc_rlhf.config import ImportanceWeight, OffPolicyConfig
from hpc_rlhf.learner import off_policy
from tests.unit.learner.experiences import experience_of

LOG_2 = math.log(2.0)
# Ratios 2, 1/2, 4 and 1/8, 2: products 4 and 1/4, geometric means 4^(1/3) and 1/2.
LOG_RATIOS = (np.array([LOG_2, -LOG_2, 2 * LOG_2]), np.array([-3 * LOG_2, LOG_2]))


def _lists(ragged: tuple[np.ndarray, ...] | None) -> list[list[float]]:
    assert ragged is not None
    return [pytest.approx(row.tolist()) for row in ragged]


def test_ratios_are_learner_over_sampler() -> None:
    got = off_policy.sampler_log_ratios(experience_of([[-1.0, -2.0]], [[-1.5, -2.0]]))
    assert _lists(got) == [[0.5, 0.0]]


def test_weights_are_truncated_above() -> None:
    token = off_policy.importance_weights(LOG_RATIOS, ImportanceWeight.TOKEN, 3.0)
    assert _lists(token) == [[2.0, 0.5, 3.0], [0.125, 2.0]]
    sequence = off_policy.importance_weights(LOG_RATIOS, ImportanceWeight.SEQUENCE, 3.0)
    assert _lists(sequence) == [[3.0, 3.0, 3.0], [0.25, 0.25]]
    assert off_policy.importance_weights(LOG_RATIOS, ImportanceWeight.NONE, 3.0) is None


def test_bounds_reject_tokens_or_completions() -> None:
    def rejected(**bounds: list[float]) -> list[list[bool]]:
        return [(~mask).tolist() for mask in off_policy.accepted(LOG_RATIOS, **bounds)]

    assert rejected() == [[False] * 3, [False] * 2]
    assert rejected(token_bounds=[0.25, 3.0]) == [[False, False, True], [True, False]]
    assert rejected(sequence_bounds=[0.5, 5.0]) == [[False] * 3, [True] * 2]
    assert rejected(geometric_bounds=[0.4, 1.5]) == [[True] * 3, [False] * 2]
    both = rejected(token_bounds=[0.25, 5.0], geometric_bounds=[0.4, 1.5])
    assert both == [[True] * 3, [True, False]]


def test_an_empty_completion_and_an_absurd_ratio_are_harmless() -> None:
    log_ratios = (np.zeros(0), np.array([2000.0]), np.array([-2000.0]))
    with np.errstate(over="raise", invalid="raise"):
        weights = off_policy.importance_weights(log_ratios, ImportanceWeight.TOKEN, 2.0)
        masks = off_policy.accepted(log_ratios, sequence_bounds=[0.5, 2.0])
    assert [w.tolist() for w in weights or ()] == [[], [2.0], [0.0]]
    assert [m.tolist() for m in masks] == [[], [False], [False]]


def test_mismatch_by_hand() -> None:
    got = off_policy.measure(experience_of([[-1.0, -2.0], [-1.0]], [[-1.5, -2.0], [-0.75]]))
    k3 = (math.exp(0.5) - 0.5 - 1) + 0.0 + (math.exp(-0.25) + 0.25 - 1)
    a, b = math.exp(0.5), math.exp(-0.25)
    assert got.as_metrics() == {
        "sampler_kl": pytest.approx(k3 / 3),
        "sampler_kl_k1": pytest.approx((-0.5 + 0.25) / 3),
        "sampler_ratio_max": pytest.approx(a),
        "sampler_ess": pytest.approx((a + 1 + b) ** 2 / (3 * (a**2 + 1 + b**2))),
        "sampler_sequence_ess": pytest.approx((a + b) ** 2 / (2 * (a**2 + b**2))),
        "logprob_gap_mean": pytest.approx(0.25),
        "logprob_gap_max": pytest.approx(0.5),
    }


def test_no_tokens_is_no_mismatch() -> None:
    got = off_policy.measure(experience_of([[]], [[]]))
    assert (got.kl, got.gap_max, got.ratio_max, got.ess) == (0.0, 0.0, 1.0, 1.0)


def test_alarm_says_how_far_and_what_to_do() -> None:
    mismatch = off_policy.measure(experience_of([[-1.0]], [[-3.0]]))
    text = off_policy.alarm(mismatch, 0.1, OffPolicyConfig())
    assert "4.39 nats a token, above 0.1" in text
    assert "largest ratio 7.39" in text
    assert "algorithm.off_policy" in text
