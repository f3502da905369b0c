"""The order in which an offline data set is learned from: a function of seed and step, no state."""

import functools

import numpy as np
from numpy.typing import NDArray


def examples_of_step(
    count: int, batch_size: int, step: int, *, seed: int | None
) -> NDArray[np.int64]:
    """Indices of the examples of optimizer step ``step``, counted from 1.

    Every epoch goes once through all ``count`` examples, in an order of its own; a batch at the end
    of an epoch is filled from the next one.

    Args:
        seed: None for the order of the file in every epoch.
    """
    positions = np.arange((step - 1) * batch_size, step * batch_size)
    if seed is None:
        return positions % count
    epochs, places = np.divmod(positions, count)
    return np.array(
        [_order(count, int(e), seed)[p] for e, p in zip(epochs, places, strict=True)], np.int64
    )


@functools.lru_cache(maxsize=2)  # a batch spans two epochs at most, unless it is larger than one
def _order(count: int, epoch: int, seed: int) -> NDArray[np.int64]:
    """A permutation, by hashing and not by a library's generator, which a version may change."""
    start = _mix(np.array([seed], np.uint64))[0] ^ np.uint64(epoch)
    keys = _mix(np.arange(count, dtype=np.uint64) + _mix(np.array([start], np.uint64)))
    return np.argsort(keys, kind="stable")


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele et al., 2014): a bijection that leaves no pattern."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
