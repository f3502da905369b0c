"""What the learner reports of an update. Pure functions of numbers that every rank holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpc_rlhf.types import Experience


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one optimizer step did, over the whole mini-batch."""

    loss: float
    learned_tokens: int
    sums: Mapping[str, float]  # over learned tokens
    maxima: Mapping[str, float]
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # read by the model, without padding
    padded_tokens: int


def merge(steps: Sequence[StepStats]) -> dict[str, float]:
    """Statistics of one or more optimizer steps.

    ``loss`` and ``grad_norm`` are means over steps, the names in ``sums`` means over all learned
    tokens (each counted as often as it was learned from), ``lr`` is that of the last step.
    """
    learned = sum(step.learned_tokens for step in steps)
    tokens = sum(step.tokens for step in steps)
    return {
        "loss": float(np.mean([step.loss for step in steps])),
        **{n: sum(step.sums[n] for step in steps) / learned for n in steps[0].sums},
        **{n: max(step.maxima[n] for step in steps) for n in steps[0].maxima},
        "grad_norm": float(np.mean([step.grad_norm for step in steps])),
        "lr": steps[-1].lr,
        "tokens": float(tokens),
        "padding_fraction": 1.0 - tokens / sum(step.padded_tokens for step in steps),
    }


def sampler_mismatch(experience: Experience) -> dict[str, float]:
    """How far the learner's log-probs of the sampled tokens are from the sampler's own.

    Over all completion tokens, with ``d = learner - sampler``: ``logprob_gap_mean`` and
    ``logprob_gap_max`` of ``|d|``, and two estimates of KL(sampler || learner), ``sampler_kl_k1``
    ``mean(-d)`` and ``sampler_kl`` (k3) ``mean(exp(d) - d - 1)``. With top-p or top-k the sampler's
    are of the truncated distribution, which counts as mismatch.
    """
    ours = np.concatenate(experience.old_logprobs).astype(np.float64)
    sampled = [rollout.completion.logprobs for rollout in experience.rollouts]
    d = ours - np.concatenate(sampled).astype(np.float64)
    if len(d) == 0:
        d = np.zeros(1)
    return {
        "sampler_kl": float(np.mean(np.exp(d) - d - 1.0)),
        "sampler_kl_k1": float(np.mean(-d)),
        "logprob_gap_mean": float(np.abs(d).mean()),
        "logprob_gap_max": float(np.abs(d).max()),
    }
