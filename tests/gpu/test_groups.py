"""The process groups of a run on a GPU: NCCL for tensors, gloo for decisions, NCCL to samplers.

One GPU holds one NCCL rank, so the transfer group here has one member, or waits for a second.
"""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from hpc_rlhf.cluster import device
from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.config import ParallelConfig
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import build_model, hf_metadata, hf_tensors, load_hf
from hpc_rlhf.sync.buckets import pack, plan_buckets, unpack
from hpc_rlhf.sync.process_group import TransferError, TransferGroup

pytestmark = pytest.mark.gpu

TIMEOUT_S = 20.0


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT_S), wait_for_workers=False
    )


def join(store: TCPStore, **options: Any) -> TransferGroup:
    return TransferGroup(
        **{
            "host": "127.0.0.1",
            "port": store.port,
            "name": "test",
            "rank": 0,
            "size": 1,
            "device": device.device(),
            "address": "127.0.0.1",
            "timeout_s": TIMEOUT_S,
            **options,
        }
    )


def occupy(seconds: float) -> None:
    """Keep the current stream busy for about this long."""
    torch.cuda._sleep(int(seconds * 1.5e9))  # cycles; the clock is between 1 and 2 GHz


@pytest.mark.gpu(cuda_only=True)
def test_decisions_do_not_wait_for_the_gpu(control: ControlGroup) -> None:
    torch.distributed.all_reduce(torch.ones(1, device=device.device()))
    device.synchronize()
    occupy(2.0)
    torch.distributed.all_reduce(torch.ones(1, device=device.device()))
    start = time.monotonic()
    assert control.broadcast({"step": 3}) == {"step": 3}
    assert control.gather("here") == ["here"]
    assert control.any(True)
    spoke = time.monotonic() - start
    device.synchronize()
    waited = time.monotonic() - start
    print(f"decisions took {spoke * 1e3:.1f} ms of {waited:.2f} s")
    assert spoke < 0.5 < waited


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_go_through_buckets_and_nccl_unchanged(
    dtype: torch.dtype, store: TCPStore, tiny_models: dict[str, Path]
) -> None:
    directory = tiny_models["qwen2-tied"]
    model = build_model(HfModelSpec.from_directory(directory), ParallelConfig(), dtype=dtype)
    load_hf(model, directory)
    plan = plan_buckets([(m.name, m.dtype, m.shape) for m in hf_metadata(model)], 1 << 16)
    assert len(plan) > 3
    tensors = dict(hf_tensors(model))
    group = join(store)
    received = {}
    for bucket in plan:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device.device())
        pack(bucket, [tensors[slot.name] for slot in bucket.slots], buffer)
        group.broadcast(buffer)
        received |= dict(unpack(bucket, buffer.cpu()))
    group.close()
    assert received.keys() == tensors.keys()
    assert all(torch.equal(received[name], tensors[name].cpu()) for name in tensors)


@pytest.mark.gpu(cuda_only=True)
def test_a_broadcast_that_does_not_finish_is_an_error_in_time(store: TCPStore) -> None:
    group = join(store, timeout_s=1.0, join_timeout_s=TIMEOUT_S)
    occupy(5.0)
    start = time.monotonic()
    with pytest.raises(TransferError, match="test rank 0/1"):
        group.broadcast(torch.zeros(1 << 20, dtype=torch.uint8, device=device.device()))
    waited = time.monotonic() - start
    group.close()
    device.synchronize()
    again = join(store, name="again")
    again.broadcast(torch.zeros(1, device=device.device()))
    again.close()
    assert 0.9 < waited < 10


def test_one_that_never_comes(store: TCPStore) -> None:
    """NCCL itself would wait for it without a bound."""
    start = time.monotonic()
    with pytest.raises(TransferError, match="transfer group test of 2 members did not form"):
        join(store, size=2, timeout_s=30.0, join_timeout_s=1.0)
    assert time.monotonic() - start < 10
