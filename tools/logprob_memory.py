"""Measures the peak memory of log-probabilities and their backward pass, chunked and not.

``python -m tools.logprob_memory --tokens 16384 --vocabulary 131072 --hidden 512 --chunk 1024``
"""

import argparse
import tempfile
import time
from dataclasses import dataclass

import torch

from hpc_rlhf.cluster import device
from hpc_rlhf.config import ParallelConfig
from hpc_rlhf.models.heads import vocab_parallel_log_probs
from hpc_rlhf.models.parallel import initialize_model_parallel


@dataclass(frozen=True)
class Cost:
    """Of one forward and backward pass, beyond inputs and weights."""

    peak_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.peak_bytes / 1e9:.2f} GB, {self.seconds:.2f} s"


def measure(
    tokens: int, vocabulary: int, hidden_size: int, *, dtype: torch.dtype, chunk: int | None
) -> Cost:
    """Log-probs and entropies of random hidden states and their gradients, on this process's device.

    torch.distributed must be initialised.

    Args:
        chunk: tokens whose logits exist at once; None: log_softmax of the whole batch.
    """
    where = device.device()
    generator = torch.Generator(where).manual_seed(0)

    def random(rows: int) -> torch.Tensor:
        drawn = torch.randn(rows, hidden_size, dtype=dtype, device=where, generator=generator)
        return drawn.requires_grad_()

    hidden, weight = random(tokens), random(vocabulary)
    targets = torch.randint(vocabulary, (tokens,), device=where)
    device.synchronize()
    device.reset_peak_memory()
    before, start = device.peak_memory_bytes(), time.perf_counter()
    if chunk is None:
        log_p = (hidden @ weight.T).float().log_softmax(-1)
        log_probs = log_p.gather(-1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
    else:
        log_probs, entropy = vocab_parallel_log_probs(
            hidden,
            weight,
            targets,
            temperature=1.0,
            chunk_tokens=chunk,
            vocab_size=vocabulary,
            group=torch.distributed.group.WORLD,
        )
    (log_probs.sum() + entropy.sum()).backward()
    device.synchronize()
    return Cost(device.peak_memory_bytes() - before, time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--plain", action="store_true", help="log_softmax of the whole batch")
    parser.add_argument("--repeat", type=int, default=1, help="the last one counts")
    arguments = parser.parse_args()

    device.prepare_process()
    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group(
            device.backend(), init_method=f"file://{store.name}", rank=0, world_size=1
        )
        initialize_model_parallel(ParallelConfig(), seed=0, timeout_s=60)
        for _ in range(arguments.repeat):
            cost = measure(
                arguments.tokens,
                arguments.vocabulary,
                arguments.hidden,
                dtype=device.resolve_dtype(arguments.dtype),
                chunk=None if arguments.plain else arguments.chunk,
            )
        print(f"{cost} beyond inputs and weights")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
