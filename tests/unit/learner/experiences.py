"""Experiences made of numbers."""

import numpy as np

from hpc_rlhf.types import Completion, Experience, Prompt, Rollout


def experience_of(learner: list[list[float]], sampler: list[list[float]]) -> Experience:
    """One prompt's completions with these log-probs, without rewards or a reference."""

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
