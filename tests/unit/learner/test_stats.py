"""Statistics of an update, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from hpc_rlhf.learner.actor_critic import mini_batch_plan
from hpc_rlhf.learner.stats import StepStats, merge, sequence_kl
from tests.unit.learner.experiences import experience_of


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


def test_kl_of_completions_by_hand() -> None:
    experience = experience_of([[-1.0, -2.0], [-1.0]], [[0.0, 0.0], [0.0]])
    assert sequence_kl(experience) is None
    refs = (np.array([-1.5, -3.0], np.float32), np.array([-0.75], np.float32))
    with_reference = replace(experience, ref_logprobs=refs)
    assert sequence_kl(with_reference) == pytest.approx(((0.5 + 1.0) + (-0.25)) / 2)


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
