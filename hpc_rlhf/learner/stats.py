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


def sequence_kl(experience: Experience) -> float | None:
    """Mean over completions of KL(old policy || reference) in nats a completion, by k1.

    None without reference log-probs.
    """
    if experience.ref_logprobs is None:
        return None
    pairs = zip(experience.old_logprobs, experience.ref_logprobs, strict=True)
    return float(np.mean([np.sum(old.astype(np.float64) - ref) for old, ref in pairs]))
