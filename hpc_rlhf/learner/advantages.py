"""Group-relative advantages: rewards of N samples and their groups -> one number per sample."""

import numpy as np
from numpy.typing import NDArray

STD_EPS = 1e-4  # as in TRL; keeps nearly equal rewards from becoming large advantages


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
