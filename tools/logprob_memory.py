"""Measures the peak memory of log-probabilities and their backward pass, chunked and not.

``python -m tools.logprob_memory --tokens 16384 --vocabulary 131072 --hidden 512 --chunk 1024``
"""

import argparse
import tempfile
import time

import torch

from hpc_rlhf.cluster import device
from hpc_rlhf.config import ParallelConfig
from hpc_rlhf.models.heads import vocab_parallel_log_probs
from hpc_rlhf.models.megatron import initialize_model_parallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--plain", action="store_true", help="log_softmax of the whole batch")
    arguments = parser.parse_args()

    device.prepare_process()
    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group(
            device.backend(), init_method=f"file://{store.name}", rank=0, world_size=1
        )
        initialize_model_parallel(ParallelConfig(), seed=0, timeout_s=60)
        options = {"dtype": device.resolve_dtype(arguments.dtype), "device": device.device()}
        hidden = torch.randn(arguments.tokens, arguments.hidden, **options, requires_grad=True)
        weight = torch.randn(arguments.vocabulary, arguments.hidden, **options, requires_grad=True)
        targets = torch.randint(arguments.vocabulary, (arguments.tokens,), device=device.device())
        device.synchronize()
        device.reset_peak_memory()
        before, start = device.peak_memory_bytes(), time.perf_counter()
        if arguments.plain:
            log_p = (hidden @ weight.T).float().log_softmax(-1)
            log_probs = log_p.gather(-1, targets[:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
        else:
            log_probs, entropy = vocab_parallel_log_probs(
                hidden,
                weight,
                targets,
                temperature=1.0,
                chunk_tokens=arguments.chunk,
                vocab_size=arguments.vocabulary,
                group=torch.distributed.group.WORLD,
            )
        (log_probs.sum() + entropy.sum()).backward()
        device.synchronize()
        used, seconds = device.peak_memory_bytes() - before, time.perf_counter() - start
        print(f"{used / 1e9:.2f} GB beyond inputs and weights, {seconds:.1f} s")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
