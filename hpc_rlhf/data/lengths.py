"""How long the sequences of a data set are, and which of them are too long."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class TooLong:
    """Records with more than ``limit`` tokens; what becomes of them is not decided here."""

    limit: int
    count: int = 0
    longest: int = 0  # tokens of the longest
    line: int = 0  # where that is

    def add(self, line: int, tokens: int) -> None:
        self.count += 1
        if tokens > self.longest:
            self.longest, self.line = tokens, line


def span(lengths: NDArray[np.int64]) -> str:
    """Of lengths of any shape: ``12 to 2048 tokens (median 230)``."""
    return f"{lengths.min()} to {lengths.max()} tokens (median {np.median(lengths):.0f})"
