"""A real learner for the tests: forked Megatron ranks that publish their weights to live servers."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed import TCPStore

from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.config import ParallelConfig, SamplerConfig, SamplingConfig, SyncConfig
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import PolicyModel, build_model, hf_tensors, load_hf
from hpc_rlhf.models.parallel import initialize_model_parallel
from hpc_rlhf.rollout.sampler import SampleRequest, SamplerPool
from hpc_rlhf.run_dir import Attempt
from hpc_rlhf.sync import collective
from hpc_rlhf.sync.collective import CollectiveTransport
from hpc_rlhf.types import Prompt
from tests.distributed.ranks import run_ranks
from tests.engine.servers import KV_CACHE_BYTES, MAX_SEQUENCE_TOKENS

T = TypeVar("T")
EOS = 2


@dataclass
class Learner:
    """What a scenario gets on each rank; ``pool`` on rank 0 only."""

    model: PolicyModel
    transport: CollectiveTransport
    control: ControlGroup
    pool: SamplerPool | None


def run_learner(
    scenario: Callable[[Learner], T],
    *,
    attempt: Attempt,
    token: str,
    model: Path,
    replicas: int,
    parallel: ParallelConfig = ParallelConfig(),  # noqa: B008 - never changed
    sampling: SamplingConfig = SamplingConfig(temperature=0.0, max_new_tokens=24),  # noqa: B008
    sync: SyncConfig = SyncConfig(bucket_bytes=32 << 10, timeout_s=30.0),  # noqa: B008
    sampler: SamplerConfig | None = None,
    timeout_s: float = 240.0,
) -> T:
    """Call ``scenario`` on every rank of a learner of the given layout; return rank 0's result."""

    def rank_main() -> T:
        rank = torch.distributed.get_rank()
        store = _store(rank)
        initialize_model_parallel(parallel, seed=1, timeout_s=60)
        policy = build_model(HfModelSpec.from_directory(model), parallel, dtype=torch.float32)
        load_hf(policy, model)
        control = ControlGroup(60)
        pool = None
        if rank == 0:
            config = sampler or SamplerConfig(
                kv_cache_bytes=KV_CACHE_BYTES, max_concurrency=16, start_timeout_s=60
            )
            pool = SamplerPool(
                attempt, token, config, sampling, replicas, [EOS], MAX_SEQUENCE_TOKENS
            )
            pool.wait_until_ready()
        transport = CollectiveTransport(sync, control, store, "127.0.0.1", pool)
        try:
            return scenario(Learner(policy, transport, control, pool))
        finally:
            transport.close()
            if pool is not None:
                pool.close()

    return run_ranks(rank_main, parallel.tensor * parallel.pipeline, timeout_s=timeout_s)[0]


def _store(rank: int) -> TCPStore:
    timeout = timedelta(seconds=60)
    port = [None]
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        port = [store.port]
    torch.distributed.broadcast_object_list(port, src=0)
    return store if rank == 0 else TCPStore("127.0.0.1", port[0], None, False, timeout)


@torch.no_grad()
def train_a_bit(model: PolicyModel, how: int) -> None:
    """Move every weight; what is replicated over ranks moves the same on all of them."""
    for parameter in model.parameters():
        steps = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter)
        parameter.add_(0.05 * torch.sin((how + 1.7) * steps))


def at_tensor(number: int, action: Callable[[], Any]) -> None:
    """In this rank, do ``action`` once, before the ``number``-th tensor of a publish is sent."""
    done = False

    def tensors(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal done
        for i, pair in enumerate(hf_tensors(model)):
            if i == number and not done:
                done = True
                action()
            yield pair

    collective.hf_tensors = tensors


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def die() -> None:
    kill(os.getpid())


def prompts(count: int, length: int = 10) -> list[Prompt]:
    rng = np.random.default_rng(5)
    return [
        Prompt(uid=f"p{i}", token_ids=rng.integers(8, 260, length + i % 3).astype(np.int32))
        for i in range(count)
    ]


def requests(count: int, step: int, samples: int = 1, length: int = 10) -> list[SampleRequest]:
    return [
        SampleRequest(prompt=prompt, sample_index=index, step=step, seed=1000 * i + index)
        for i, prompt in enumerate(prompts(count, length))
        for index in range(samples)
    ]
