"""CPU or CUDA: the only module that knows which one this process computes on.

megatron-core has no notion of a device: it says "cuda" literally. On a machine without CUDA
:func:`prepare_process` lets those calls mean the CPU, so that the same classes run on both.
"""

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from hpc_rlhf.config import DType, SamplerConfig
from hpc_rlhf.errors import ComponentError, UserError

AttentionKernel = Literal["varlen", "sdpa"]

_CPU = torch.device("cpu")
_ALIGNMENT = 64  # bytes; of a cache line

# What megatron-core makes every process say, and no user can act on: TransformerEngine and Apex are
# not used here, and it calls collectives by names that torch has renamed. Only these texts: any
# other warning is shown.
_IRRELEVANT_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"Transformer Engine and Apex are not installed\.", UserWarning),
    (r"Apex is not installed\. Falling back to Torch Norm", UserWarning),
    (r"`torch\.distributed\.all_gather_into_tensor` is deprecated\.", FutureWarning),
    (r"`torch\.distributed\.reduce_scatter_tensor` is deprecated\.", FutureWarning),
)


@functools.cache
def has_cuda() -> bool:
    # Through the management library: asking CUDA itself would start it, and an engine that is forked
    # from this process could then not use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.is_available()


def device() -> torch.device:
    """Where this process keeps its tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else _CPU


def backend() -> Literal["nccl", "gloo"]:
    """Name of the torch.distributed backend for tensors on :func:`device`."""
    return "nccl" if has_cuda() else "gloo"


def resolve_dtype(name: DType | str = DType.AUTO) -> torch.dtype:
    """The dtype of parameters and activations; ``auto`` is bfloat16 on a GPU, float32 on a CPU."""
    match DType(name):
        case DType.AUTO:
            return torch.bfloat16 if has_cuda() else torch.float32
        case DType.BFLOAT16:
            return torch.bfloat16
        case DType.FLOAT32:
            return torch.float32


def attention_kernel(dtype: torch.dtype) -> AttentionKernel:
    """Which kernel computes packed attention: flash attention takes half precision on CUDA only."""
    half = dtype in (torch.bfloat16, torch.float16)
    return "varlen" if has_cuda() and half else "sdpa"


def import_megatron() -> None:
    """Import megatron-core without TorchInductor; call it before anything else imports it.

    It decorates its fused activations with ``torch.compile`` while it is imported. That imports the
    whole compiler, which is a third of a learner's imports, for functions that no model here uses.
    """
    compiler = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        from megatron.core import jit  # with it, all of the package's __init__
    finally:
        torch.compile = compiler
    jit.disable_jit_fuser()  # for the modules that are imported later


def prepare_process(
    local_rank: int = 0,
    *,
    address: str | None = None,
    threads: int | None = None,
    deterministic: bool = False,
) -> None:
    """Make this process ready for torch.distributed and megatron-core; call it before both.

    Calling it again in the same process changes nothing but the arguments' effects. Other threads
    that compute call :func:`enter_thread`.

    Args:
        local_rank: index of this process on its node; picks its GPU.
        address: this node's address, whose network interface NCCL and gloo are to use; default:
            their own choice.
        threads: intra-op CPU threads; default: ``OMP_NUM_THREADS``, else torch's choice.
        deterministic: choose kernels that sum in a fixed order, so that a step repeated from the
            same state on the same device gives the same bits.

    Raises:
        ComponentError: no network interface has ``address``.
    """
    for message, category in _IRRELEVANT_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    if address is not None:
        interface = _interface_of(address)
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    # Megatron overlaps the collectives of its backward pass by launch order, which CUDA keeps only
    # with one connection; it warns on any device where this is not set.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if threads is not None:
        torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its start
        torch.use_deterministic_algorithms(True)
        # On with it by default: writes all memory that is allocated, to find reads of it too early.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if has_cuda():
        _Process.cuda_index = local_rank % torch.cuda.device_count()
    else:
        _let_cuda_mean_cpu()
    enter_thread()


def enter_thread() -> None:
    """Make the calling thread compute where the process does; once per thread, after prepare_process.

    Both the current CUDA device and torch's function modes belong to one thread.
    """
    if has_cuda():
        torch.cuda.set_device(_Process.cuda_index)
    elif not getattr(_thread, "entered", False):
        _CudaMeansCpu().__enter__()
        _thread.entered = True


def synchronize() -> None:
    """Wait for the device's queued work; for timing."""
    if has_cuda():
        torch.cuda.synchronize()


def reset_peak_memory() -> None:
    """Start a new window of :func:`peak_memory_bytes`."""
    if has_cuda():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM


def peak_memory_bytes() -> int:
    """Most memory used since :func:`reset_peak_memory`: allocated on the GPU, resident on a CPU."""
    if has_cuda():
        return torch.cuda.max_memory_allocated()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def host_buffers(like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Uninitialised host tensors of the shapes and dtypes of ``like``, for :func:`copy_to_host`.

    They share one piece of memory (on CUDA page-locked until the process ends, which takes about a
    second for 4 GB) and have storages of their own, so that each can be serialised by itself.
    """
    offsets = [0]
    for tensor in like:
        offsets.append(offsets[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
    memory = torch.empty(offsets[-1], dtype=torch.uint8, device=_CPU)
    if has_cuda() and memory.nbytes:
        # Not pin_memory=True: torch's allocator rounds up to a power of two.
        torch.cuda.check_error(
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        )
    content = memory.numpy()
    return [
        torch.frombuffer(content, dtype=t.dtype, count=t.numel(), offset=offset).view(t.shape)
        for t, offset in zip(like, offsets[:-1], strict=True)
    ]


def copy_to_host(
    sources: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]
) -> Callable[[], None]:
    """Copy each source into its buffer, of :func:`host_buffers`.

    On CUDA the copies are queued on the current stream: work queued behind them, which may change
    the sources, begins when they are done, and this thread goes on.

    Returns:
        Waits until the buffers hold the copies; for any thread.
    """
    for source, buffer in zip(sources, buffers, strict=True):
        buffer.copy_(source, non_blocking=True)
    if not has_cuda():
        return lambda: None
    copied = torch.cuda.Event()
    copied.record()
    return copied.synchronize


def _interface_of(address: str) -> str:
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    raise ComponentError(f"no network interface of this node has the address {address}")


def engine_environment(tensor_parallel: int) -> dict[str, str]:
    """Environment variables of a vLLM server on this machine; set them before importing vLLM.

    Args:
        tensor_parallel: workers of the server; on a CPU they share its cores.
    """
    if has_cuda():
        return {}
    cores = len(os.sched_getaffinity(0))
    environment = {
        # Slurm or the launcher has bound the process; vLLM's own binding would take whole NUMA
        # nodes. It needs a thread count then, or every worker takes every core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, cores // tensor_parallel)),
        # Compiling costs 11 s at the first request with log-probs.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if tensor_parallel == 1:  # the worker inside the engine's process: 5 s less to start
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def engine_arguments(sampler: SamplerConfig, max_sequence_tokens: int) -> list[str]:
    """Arguments of a vLLM server that depend on the machine.

    Args:
        max_sequence_tokens: prompt and completion; the server's context length.

    Raises:
        UserError: ``sampler.kv_cache_bytes`` is needed here and not set.
    """
    arguments = []
    if sampler.kv_cache_bytes is not None:
        arguments += ["--kv-cache-memory-bytes", str(sampler.kv_cache_bytes)]
    if has_cuda():
        arguments += ["--gpu-memory-utilization", str(sampler.gpu_memory_utilization)]
    elif sampler.kv_cache_bytes is None:
        raise UserError(
            "sampler.kv_cache_bytes: needed on a CPU, where vLLM would otherwise take nearly all "
            "memory of the node; set it to the bytes that the KV cache may use"
        )
    if sampler.enforce_eager or not has_cuda():
        arguments.append("--enforce-eager")
    if not has_cuda():
        # A prompt that is prefilled in chunks samples a token per chunk and rewinds the noise of its
        # seed. A CPU generator cannot be rewound: vLLM 0.32 dies of it.
        budget = max(max_sequence_tokens, _CPU_PREFILL_TOKENS)
        arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(budget)]
    return arguments


_CPU_PREFILL_TOKENS = 4096  # prompt tokens of one engine step


class _Process:
    cuda_index = 0


_thread = threading.local()


class _CudaMeansCpu(TorchFunctionMode):
    """``device="cuda"`` makes a CPU tensor, ``.cuda()`` and pinning do nothing.

    ``Tensor.type()`` gives the CUDA name, which Megatron's optimizers compare. It is a mode rather
    than wrappers of ``torch.empty`` and its like because those break ``torch.device("meta")``
    contexts. Costs about 1.4 us per torch call.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if kwargs:
            kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            result = result.replace("torch.", "torch.cuda.", 1)
        return result


def _names_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


class _Stream:
    """A CUDA stream where everything is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = record_event = synchronize = _nothing


def _let_cuda_mean_cpu() -> None:
    """Replace the functions of ``torch.cuda`` that megatron-core calls by what they mean on a CPU."""
    if issubclass(torch.cuda.Stream, _Stream):
        return
    replacements: dict[str, Any] = {
        "Stream": _Stream,
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = replacements["get_rng_state"]

    from megatron.core.tensor_parallel import random

    # This one goes to torch._C, past torch.cuda.
    random._set_cuda_rng_state = replacements["set_rng_state"]
