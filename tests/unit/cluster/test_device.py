import subprocess
import sys

import psutil
import pytest
import torch

from hpc_rlhf.cluster import device
from hpc_rlhf.config import DType
from hpc_rlhf.errors import ComponentError

CPU_ONLY = """
import os, threading, torch
from hpc_rlhf.cluster import device

device.prepare_process(threads=1)
device.prepare_process(threads=1)  # again: nothing is wrapped twice
assert device.device() == torch.device("cpu") and device.backend() == "gloo"
assert device.attention_kernel(torch.bfloat16) == "sdpa"

def means_cpu():
    x = torch.ones(2, device="cuda", pin_memory=True)
    assert x.device.type == "cpu" and x.cuda() is x and x.type() == "torch.cuda.FloatTensor"
    assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
    return x

means_cpu()
with torch.device("meta"):
    assert torch.empty(1).device.type == "meta"
assert torch.ones(1, device="meta").device.type == "meta"

found = []
def in_thread(enter):
    if enter:
        device.enter_thread()
    try:
        found.append(means_cpu().sum().item())
    except (AssertionError, RuntimeError):
        found.append("no CUDA")

for enter in (True, False):
    thread = threading.Thread(target=in_thread, args=(enter,))
    thread.start()
    thread.join()
assert found == [2.0, "no CUDA"], found

import megatron.core.models.gpt, megatron.core.optimizer
print("ready", torch.get_num_threads(), os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
"""


def test_cuda_means_cpu_in_threads_that_entered_and_megatron_imports_quietly() -> None:
    """In a process of its own: it replaces functions of torch.cuda."""
    done = subprocess.run(
        [sys.executable, "-c", CPU_ONLY],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ready", "1", "1"]
    assert "not installed" not in done.stderr


def test_dtypes() -> None:
    assert device.resolve_dtype("bfloat16") is torch.bfloat16
    assert device.resolve_dtype(DType.FLOAT32) is torch.float32
    expected = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    assert device.resolve_dtype() is expected


def test_interface_is_found_by_address() -> None:
    name = device._interface_of("127.0.0.1")
    assert "127.0.0.1" in {entry.address for entry in psutil.net_if_addrs()[name]}
    with pytest.raises(ComponentError, match=r"has the address 192\.0\.2\.1"):
        device._interface_of("192.0.2.1")


def test_peak_memory_has_a_window() -> None:
    torch.ones(64 << 20, dtype=torch.uint8, device=device.device())
    device.reset_peak_memory()
    before = device.peak_memory_bytes()
    torch.ones(32 << 20, dtype=torch.uint8, device=device.device())
    used = device.peak_memory_bytes() - before
    assert 30 << 20 < used < 40 << 20


def test_copies_on_the_host_stand_alone_and_do_not_follow_their_sources() -> None:
    where = device.device()
    sources = [
        torch.randn(3, 5, device=where).T,  # not contiguous
        torch.randn(7, device=where).to(torch.bfloat16),
        torch.arange(4, device=where),
    ]
    expected = [source.cpu().clone() for source in sources]
    buffers = device.host_buffers(sources)
    wait = device.copy_to_host(sources, buffers)
    for source in sources:
        source.zero_()  # queued behind the copy
    wait()
    for buffer, value in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, value)
        assert buffer.dtype == value.dtype
        assert buffer.is_contiguous()
        assert buffer.untyped_storage().nbytes() == buffer.nbytes, "serialised with its neighbours"
    assert device.host_buffers([]) == []
