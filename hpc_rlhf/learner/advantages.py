"""Rewards -> advantages: a number a sample from its group, or a number a token. Pure functions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STD_EPS = 1e-4  # as in TRL; keeps nearly equal rewards from becoming large advantages
VARIANCE_EPS = 1e-8  # of whitening, as in OpenRLHF and TRL's PPO

Ragged = tuple[NDArray[np.float32], ...]  # N x [T_i], a number of every completion token


def grpo(
    rewards: NDArray[np.floating], groups: NDArray[np.integer], *, normalize_std: bool
) -> NDArray[np.float32]:
    """``(r - mean) / (std + 1e-4)`` within the group, or ``r - mean`` without ``normalize_std``.

    DeepSeekMath (arXiv:2402.03300, sec. 4.1.2) names "the standard deviation" of the group's
    rewards without saying which; this is the sample one (division by n - 1), as in TRL. Dr. GRPO
    (arXiv:2503.20783) drops the division, which favours prompts with nearly equal rewards.

    Args:
        rewards: [N].
        groups: [N], equal for samples of one prompt.

    Returns:
        float32 [N]; exactly 0 in groups of one sample and in groups of equal rewards.
    """
    centred, counts, inverse = _centre(rewards, groups)
    if normalize_std:
        squares = np.bincount(inverse, centred**2)
        std = np.sqrt(squares / np.maximum(counts - 1, 1))
        centred = centred / (std + STD_EPS)[inverse]
    return centred.astype(np.float32)


def rloo(rewards: NDArray[np.floating], groups: NDArray[np.integer]) -> NDArray[np.float32]:
    """REINFORCE with a leave-one-out baseline: ``r_i - mean of the others in its group``.

    Ahmadian et al., arXiv:2402.14740, sec. 3; Kool et al. (2019). Equal to ``n / (n - 1)`` times
    the group-centred reward.

    Returns:
        float32 [N]; exactly 0 in groups of one sample (no baseline) and of equal rewards.
    """
    centred, counts, inverse = _centre(rewards, groups)
    scale = counts / np.maximum(counts - 1, 1)
    return (centred * scale[inverse]).astype(np.float32)


def reinforce_plus_plus(
    rewards: NDArray[np.floating],
    penalties: Sequence[NDArray[np.floating]],
    groups: NDArray[np.integer],
    *,
    group_baseline: bool,
) -> Ragged:
    """REINFORCE++: the rest of the penalised return, whitened over all tokens of the global batch.

    Hu et al., arXiv:2501.03262, eqs. 8 to 10: ``A_t = r - sum over i >= t of beta KL(i)``, less the
    batch's mean and over its standard deviation. With ``group_baseline`` ("REINFORCE++ w/
    baseline") the group's mean reward is subtracted from ``r`` first.

    Args:
        rewards: [N], of whole completions.
        penalties: N x [T_i], what is subtracted from the reward at each token (beta KL).
        groups: [N], equal for samples of one prompt.
    """
    r = np.asarray(rewards, np.float64)
    if group_baseline:
        r = _centre(r, groups)[0]
    returns = [
        r_i - np.cumsum(np.asarray(p, np.float64)[::-1])[::-1]
        for r_i, p in zip(r, penalties, strict=True)
    ]
    return whiten(returns)


def gae(
    rewards: Sequence[NDArray[np.floating]],
    values: Sequence[NDArray[np.floating]],
    *,
    gamma: float,
    lam: float,
) -> tuple[Ragged, Ragged]:
    """Generalised advantage estimates of completions that end with their last token, and returns.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` with ``V`` 0 behind the last token, ``A_t = delta_t +
    gamma lam A_{t+1}`` (Schulman et al., arXiv:1506.02438, eqs. 11 and 16; arXiv:1707.06347, eqs. 11
    and 12). A return, what the critic learns, is ``A_t + V_t``.

    Args:
        rewards: N x [T_i], of the tokens.
        values: N x [T_i], of the states that the tokens were sampled in.

    Returns:
        Advantages and returns, float32, N x [T_i] each.
    """
    lengths = [len(r) for r in rewards]
    longest = max(lengths, default=0)
    r, v = (np.zeros((longest + 1, len(lengths))) for _ in range(2))
    for i, (rewards_i, values_i) in enumerate(zip(rewards, values, strict=True)):
        r[: lengths[i], i], v[: lengths[i], i] = rewards_i, values_i
    # Behind the end of a completion rewards and values are 0, hence delta and advantage.
    a = np.zeros_like(r)
    for t in range(longest - 1, -1, -1):
        a[t] = r[t] + gamma * v[t + 1] - v[t] + gamma * lam * a[t + 1]
    columns = [(a[:n, i], v[:n, i]) for i, n in enumerate(lengths)]
    return (
        tuple(a_i.astype(np.float32) for a_i, _ in columns),
        tuple((a_i + v_i).astype(np.float32) for a_i, v_i in columns),
    )


def explained_variance(
    returns: Sequence[NDArray[np.floating]], values: Sequence[NDArray[np.floating]]
) -> float:
    """``1 - Var(returns - values) / Var(returns)`` over all tokens; 0 where returns are all equal.

    1 is a perfect critic, 0 one that knows no more than the mean, below 0 one that is worse.
    """
    r = np.concatenate([*returns, np.zeros(0)]).astype(np.float64)
    v = np.concatenate([*values, np.zeros(0)]).astype(np.float64)
    if len(r) == 0 or r.min() == r.max():
        return 0.0
    return float(1.0 - np.var(r - v) / np.var(r))


def whiten(values: Sequence[NDArray[np.floating]]) -> Ragged:
    """``(x - mean) / sqrt(variance + 1e-8)`` over all tokens of all sequences.

    The population's variance (division by n). All zeros where all values are equal.
    """
    lengths = [len(v) for v in values]
    flat = np.concatenate([*values, np.zeros(0)]).astype(np.float64)
    if len(flat) == 0 or flat.min() == flat.max():
        flat = np.zeros_like(flat)
    else:
        flat = (flat - flat.mean()) / np.sqrt(flat.var() + VARIANCE_EPS)
    return split(flat.astype(np.float32), lengths)


def spread(per_sample: NDArray[np.floating], lengths: Sequence[int]) -> Ragged:
    """The sample's number on each of its tokens."""
    return tuple(np.full(n, a, np.float32) for n, a in zip(lengths, per_sample, strict=True))


def split(flat: NDArray[np.float32], lengths: Sequence[int]) -> Ragged:
    """Undo a concatenation of sequences of ``lengths``."""
    return tuple(np.split(flat, np.cumsum(lengths)[:-1])) if len(lengths) else ()


def _centre(
    rewards: NDArray[np.floating], groups: NDArray[np.integer]
) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]:
    """Rewards minus their group's mean [N], sizes of groups [G], group of each sample [N]."""
    r = np.asarray(rewards, np.float64)
    if not np.isfinite(r).all():
        raise ValueError(f"rewards must be finite, got {r}: leave excluded samples out")
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    means = np.bincount(inverse, r) / counts
    centred = r - means[inverse]
    # The mean of equal numbers may be off by a rounding error, which dividing by the std inflates.
    low, high = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(low, inverse, r)
    np.maximum.at(high, inverse, r)
    centred[(low == high)[inverse]] = 0.0
    return centred, counts, inverse
