"""A step's batch in one round, or in several with dynamic sampling."""

import numpy as np

from hpc_rlhf.rollout.batch import StepBatch, sample_requests
from hpc_rlhf.types import Completion, Prompt, Rollout, Scores

SAMPLES = 2


def _prompts(*uids: str) -> list[Prompt]:
    return [Prompt(uid=uid, token_ids=np.array([1], np.int32)) for uid in uids]


def _sampled(batch: StepBatch, *uids: str) -> StepBatch:
    """A round with two samples of each prompt."""
    requests = sample_requests(_prompts(*uids), SAMPLES, 0, batch.step, before=batch.rollouts)
    return batch.sampled(
        [
            Rollout(
                prompt=request.prompt,
                sample_index=request.sample_index,
                step=request.step,
                completion=Completion(
                    token_ids=np.array([2], np.int32),
                    logprobs=np.zeros(1, np.float32),
                    finish_reason="stop",
                    versions=(),
                    seed=request.seed,
                ),
            )
            for request in requests
        ]
    )


def _scores(*rewards: float) -> Scores:
    excluded = {i: "failed" for i, reward in enumerate(rewards) if np.isnan(reward)}
    return Scores(rewards=np.array(rewards, np.float32), excluded=excluded)


def _names(batch: StepBatch) -> list[str]:
    return [f"{r.prompt.uid}{r.sample_index}" for r in batch.rollouts]


def test_one_round_is_the_whole_batch() -> None:
    batch = StepBatch(step=3, prompts=2)
    assert batch.wanted == 2
    batch = _sampled(batch, "a", "b")
    assert batch.fresh == batch.rollouts
    batch = batch.scored(_scores(1, 1, 0, 0))
    assert batch.wanted == 0
    assert batch.fresh == ()
    assert batch.whole() is batch
    assert batch.metrics() == {}


def test_groups_of_equal_rewards_are_replaced() -> None:
    batch = StepBatch(step=3, prompts=3, max_rounds=3)
    batch = _sampled(batch, "a", "b", "c").scored(_scores(1, 0, 1, 1, 0, 0))
    assert batch.wanted == 2
    batch = _sampled(batch, "d", "e")
    assert [r.prompt.uid for r in batch.fresh] == ["d", "d", "e", "e"]
    batch = batch.scored(_scores(0.5, 0.25, 0, 0))
    assert batch.wanted == 1
    batch = _sampled(batch, "f").scored(_scores(1, 0))
    assert batch.wanted == 0
    whole = batch.whole()
    assert _names(whole) == ["a0", "a1", "d0", "d1", "f0", "f1"]
    assert whole.scores is not None
    assert whole.scores.rewards.tolist() == [1, 0, 0.5, 0.25, 1, 0]
    assert batch.metrics() == {
        "dynamic/rounds": 3.0,
        "dynamic/groups": 6.0,
        "dynamic/uninformative": 3.0,
        "dynamic/filled": 0.0,
    }


def test_rounds_are_bounded_and_what_is_missing_is_filled() -> None:
    batch = StepBatch(step=3, prompts=2, max_rounds=2)
    batch = _sampled(batch, "a", "b").scored(_scores(1, 1, 0, 0))
    batch = _sampled(batch, "c", "d").scored(_scores(0, 0, 1, 0))
    assert batch.wanted == 0
    assert _names(batch.whole()) == ["a0", "a1", "d0", "d1"]
    assert batch.metrics()["dynamic/filled"] == 1.0
    nothing = StepBatch(step=3, prompts=2, max_rounds=2)
    nothing = _sampled(nothing, "a", "b").scored(_scores(1, 1, 1, 1))
    nothing = _sampled(nothing, "c", "d").scored(_scores(1, 1, 1, 1))
    assert _names(nothing.whole()) == ["a0", "a1", "b0", "b1"]


def test_excluded_samples_do_not_make_a_difference_in_reward() -> None:
    batch = StepBatch(step=3, prompts=2, max_rounds=2)
    batch = _sampled(batch, "a", "b").scored(_scores(1, np.nan, 0, 1))
    assert batch.wanted == 1
    batch = _sampled(batch, "c").scored(_scores(np.nan, 1))
    whole = batch.whole()
    assert _names(whole) == ["a0", "a1", "b0", "b1"]
    assert whole.scores is not None
    assert dict(whole.scores.excluded) == {1: "failed"}


def test_a_prompt_that_comes_again_gets_further_samples() -> None:
    """A data set smaller than what a step asks for; the samples form one group."""
    batch = StepBatch(step=3, prompts=2, max_rounds=2)
    batch = _sampled(batch, "a", "b").scored(_scores(1, 1, 0, 1))
    batch = _sampled(batch, "a").scored(_scores(0, 0))
    assert _names(batch) == ["a0", "a1", "b0", "b1", "a2", "a3"]
    assert len({r.completion.seed for r in batch.rollouts}) == 6
    assert batch.metrics()["dynamic/uninformative"] == 0.0
    assert len(batch.whole().rollouts) == 6
