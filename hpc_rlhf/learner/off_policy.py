"""Samples of another policy than the one that learns: how far apart, and what to do about it.

Three policies: the *behaviour* policy sampled (the sampler's engine, whatever its precision, kernels
and version of the weights), the *proximal* policy is the learner's before the update, the *current*
one changes in the update. Decoupled PPO (Hilton et al., arXiv:2110.00641; for language models Fu et
al., arXiv:2505.24298) weighs the surrogate, whose ratio is current / proximal, by proximal /
behaviour. Truncating that weight bounds its variance (Espeholt et al., arXiv:1802.01561; Yao et al.,
"Your efficient RL framework secretly brings you off-policy RL training", 2025).

Weights say how much a token counts, masks whether it is learned from at all; neither implies the
other. Everything is made from log-ratios learner - sampler, N x [T_i]. Pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_rlhf.config import ImportanceWeight, OffPolicyConfig
from hpc_rlhf.learner.advantages import Ragged, spread
from hpc_rlhf.types import Experience

_MAX_LOG = 80.0  # exp of it is still a float32


def sampler_log_ratios(experience: Experience) -> tuple[NDArray[np.float64], ...]:
    """Log of learner's over sampler's probability of every completion token, N x [T_i]."""
    return tuple(
        np.asarray(old, np.float64) - np.asarray(rollout.completion.logprobs, np.float64)
        for old, rollout in zip(experience.old_logprobs, experience.rollouts, strict=True)
    )


def importance_weights(
    log_ratios: Sequence[NDArray[np.float64]], weight: ImportanceWeight, cap: float
) -> Ragged | None:
    """Truncated importance weights ``min(proximal / behaviour, cap)``, N x [T_i].

    Of the token, or of the whole completion (the product over its tokens) on each of its tokens.
    TRL's ``token_truncate`` and ``sequence_truncate``.

    Returns:
        None for ``ImportanceWeight.NONE``.
    """
    match weight:
        case ImportanceWeight.NONE:
            return None
        case ImportanceWeight.TOKEN:
            return tuple(_exp(d, cap).astype(np.float32) for d in log_ratios)
        case ImportanceWeight.SEQUENCE:
            totals = np.array([d.sum() for d in log_ratios])
            return spread(_exp(totals, cap), [len(d) for d in log_ratios])


def accepted(
    log_ratios: Sequence[NDArray[np.float64]],
    *,
    token_bounds: Sequence[float] | None = None,
    sequence_bounds: Sequence[float] | None = None,
    geometric_bounds: Sequence[float] | None = None,
) -> tuple[NDArray[np.bool_], ...]:
    """Which tokens to learn from, N x [T_i]: those inside of all the bounds given.

    Each bound is ``[low, high]``, inclusive. A token's own ratio is bounded by ``token_bounds``
    (TRL's ``token_mask``); a completion is rejected as a whole by the product of its tokens' ratios
    (``sequence_bounds``, TRL's ``sequence_mask``) or by their geometric mean, whose scale does not
    depend on the length (``geometric_bounds``).
    """
    masks = []
    for d in log_ratios:
        mask = np.ones(len(d), np.bool_)
        if len(d):
            mask &= _within(d, token_bounds)
            mask &= _within(d.sum(), sequence_bounds) & _within(d.mean(), geometric_bounds)
        masks.append(mask)
    return tuple(masks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far the learner's log-probs of the sampled tokens are from the sampler's own.

    Over all completion tokens, with ``d = learner - sampler``. With top-p or top-k the sampler's
    are of the truncated distribution, which counts as mismatch.
    """

    kl: float  # k3, mean(exp(d) - d - 1): KL(sampler || learner) in nats a token
    kl_k1: float  # the same by k1, mean(-d)
    gap_mean: float  # of |d|
    gap_max: float
    ratio_max: float  # of exp(d)
    ess: float  # effective samples, (sum of exp(d))^2 / sum of exp(2 d), as a fraction of tokens
    sequence_ess: float  # the same with whole completions' ratios, as a fraction of completions

    def as_metrics(self) -> dict[str, float]:
        return {
            "sampler_kl": self.kl,
            "sampler_kl_k1": self.kl_k1,
            "sampler_ratio_max": self.ratio_max,
            "sampler_ess": self.ess,
            "sampler_sequence_ess": self.sequence_ess,
            "logprob_gap_mean": self.gap_mean,
            "logprob_gap_max": self.gap_max,
        }


def measure(experience: Experience) -> Mismatch:
    """Mismatch of sampler and learner; zeros and full effective samples without any token."""
    log_ratios = [d for d in sampler_log_ratios(experience) if len(d)]
    d = np.concatenate(log_ratios) if log_ratios else np.zeros(1)
    totals = np.array([r.sum() for r in log_ratios]) if log_ratios else np.zeros(1)
    return Mismatch(
        kl=float(np.mean(_exp(d) - d - 1.0)),
        kl_k1=float(np.mean(-d)),
        gap_mean=float(np.abs(d).mean()),
        gap_max=float(np.abs(d).max()),
        ratio_max=float(_exp(d.max())),
        ess=_effective_fraction(d),
        sequence_ess=_effective_fraction(totals),
    )


def alarm(mismatch: Mismatch, bound: float, config: OffPolicyConfig) -> str:
    """What to say of a mismatch above ``bound``."""
    return (
        f"the samplers' log-probs are not the learner's: KL(sampler || learner) is "
        f"{mismatch.kl:.3g} nats a token, above {bound:g}; largest ratio {mismatch.ratio_max:.3g}, "
        f"effective samples {mismatch.ess:.0%}. Samples of stale weights, another precision, or a "
        "truncated distribution (sampling.top_p, top_k)? See algorithm.off_policy: "
        f"weight={config.weight} and the bounds correct for it"
    )


def _exp(d: NDArray[np.float64] | np.float64, cap: float = np.inf) -> NDArray[np.float64]:
    return np.minimum(np.exp(np.minimum(d, _MAX_LOG)), cap)


def _within(
    d: NDArray[np.float64] | np.float64, bounds: Sequence[float] | None
) -> NDArray[np.bool_]:
    if bounds is None:
        return np.ones(np.shape(d), np.bool_)
    low, high = bounds
    ratio = _exp(d)
    return np.asarray((ratio >= low) & (ratio <= high))


def _effective_fraction(d: NDArray[np.float64]) -> float:
    """Kish's effective sample size of weights exp(d), over their number."""
    w = np.exp(d - d.max())
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))
