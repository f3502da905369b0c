"""Statistics of an update, by hand."""

import math

import numpy as np
import pytest

from hpc_rlhf.learner.stats import StepStats, merge, sampler_mismatch
from hpc_rlhf.learner.trainer import mini_batch_plan
from hpc_rlhf.types import Completion, Experience, Prompt, Rollout


def test_merge_weighs_tokens_and_steps_as_documented() -> None:
    first = StepStats(
        loss=1.0,
        learned_tokens=10,
        sums={"entropy": 20.0},
        maxima={"ratio_max": 1.5},
        grad_norm=2.0,
        lr=0.1,
        tokens=30,
        padded_tokens=40,
    )
    second = StepStats(
        loss=3.0,
        learned_tokens=30,
        sums={"entropy": 0.0},
        maxima={"ratio_max": 1.2},
        grad_norm=4.0,
        lr=0.05,
        tokens=30,
        padded_tokens=40,
    )
    assert merge([first, second]) == {
        "loss": 2.0,
        "entropy": 0.5,
        "ratio_max": 1.5,
        "grad_norm": 3.0,
        "lr": 0.05,
        "tokens": 60.0,
        "padding_fraction": 0.25,
    }


def _experience(learner: list[list[float]], sampler: list[list[float]]) -> Experience:
    def rollout(logprobs: list[float]) -> Rollout:
        completion = Completion(
            token_ids=np.zeros(len(logprobs), np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish_reason="stop",
            versions=(),
            seed=0,
        )
        prompt = Prompt(uid="p", token_ids=np.array([1], np.int32))
        return Rollout(prompt=prompt, sample_index=0, completion=completion, step=0)

    return Experience(
        rollouts=tuple(rollout(lp) for lp in sampler),
        rewards=np.zeros(len(sampler), np.float32),
        old_logprobs=tuple(np.array(lp, np.float32) for lp in learner),
        ref_logprobs=None,
    )


def test_mismatch_by_hand() -> None:
    got = sampler_mismatch(_experience([[-1.0, -2.0], [-1.0]], [[-1.5, -2.0], [-0.75]]))
    k3 = (math.exp(0.5) - 0.5 - 1) + 0.0 + (math.exp(-0.25) + 0.25 - 1)
    assert got == {
        "sampler_kl": pytest.approx(k3 / 3),
        "sampler_kl_k1": pytest.approx((-0.5 + 0.25) / 3),
        "logprob_gap_mean": pytest.approx(0.25),
        "logprob_gap_max": pytest.approx(0.5),
    }


def test_no_tokens_is_no_mismatch() -> None:
    assert set(sampler_mismatch(_experience([[]], [[]])).values()) == {0.0}


@pytest.mark.parametrize(("samples", "mini_batches"), [(12, 3), (7, 3), (2, 4)])
def test_every_epoch_learns_every_sample_once_in_its_own_order(
    samples: int, mini_batches: int
) -> None:
    plan = mini_batch_plan(samples, 2, mini_batches, seed=(3, 0))
    steps = min(samples, mini_batches)
    assert len(plan) == 2 * steps
    epochs = [np.concatenate(plan[:steps]).tolist(), np.concatenate(plan[steps:]).tolist()]
    assert [sorted(epoch) for epoch in epochs] == [list(range(samples))] * 2
    sizes = [len(part) for part in plan]
    assert max(sizes) - min(sizes) <= 1
    again = mini_batch_plan(samples, 2, mini_batches, seed=(3, 0))
    assert [p.tolist() for p in again] == [p.tolist() for p in plan]


def test_order_depends_on_seed_update_and_epoch() -> None:
    def order(*seed: int) -> list[int]:
        return np.concatenate(mini_batch_plan(20, 1, 2, seed=seed)).tolist()

    assert order(0, 0) != order(0, 1) != order(1, 1)
    first, second = (
        np.concatenate(mini_batch_plan(20, 2, 2, seed=(0, 0))[i : i + 2]) for i in (0, 2)
    )
    assert first.tolist() != second.tolist()
