"""What is done to rewards before they become advantages. Pure functions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def overlong_penalty(
    lengths: Sequence[int], max_new_tokens: int, buffer_tokens: float, penalty: float
) -> NDArray[np.float64]:
    """What to add to the reward of completions of ``lengths`` tokens, at most 0, [N].

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13) times ``penalty``: 0 up to
    ``max_new_tokens - buffer_tokens``, from there falling linearly to ``-penalty`` at
    ``max_new_tokens``, where sampling is cut.

    Args:
        buffer_tokens: greater than 0, at most ``max_new_tokens``.
    """
    over = np.asarray(lengths, np.float64) - (max_new_tokens - buffer_tokens)
    return -penalty * np.clip(over / buffer_tokens, 0.0, 1.0)
