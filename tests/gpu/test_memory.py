"""The memory of the log-probabilities at a real vocabulary."""

import pytest
import torch

from tools.logprob_memory import measure

pytestmark = pytest.mark.gpu(cuda_only=True)  # 50 GB

TOKENS, VOCABULARY, HIDDEN = 16384, 131072, 4096


def test_chunks_bound_the_memory_of_log_probs() -> None:
    """Twice one chunk's float32 logits and its bfloat16 form, and the gradient of the output matrix
    in float32 and bfloat16: 4.6 GB, where plain log_softmax needs five copies of 8.6 GB."""
    chunked = measure(TOKENS, VOCABULARY, HIDDEN, dtype=torch.bfloat16, chunk=1024)
    plain = measure(TOKENS, VOCABULARY, HIDDEN, dtype=torch.bfloat16, chunk=None)
    print(f"chunks of 1024: {chunked}; plain: {plain}")
    assert chunked.peak_bytes < 5e9
    assert plain.peak_bytes > 8 * chunked.peak_bytes
