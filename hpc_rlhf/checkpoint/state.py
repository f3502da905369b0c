"""``state.h5``: what a checkpoint holds besides tensors of the model and optimizer.

Datasets (W ranks)::

    /run_state               JSON text: step, cursors, counters, frozen models
    /rng/python              uint32 [W, 625]   random.getstate(): Mersenne twister and position
    /rng/python_gauss        float64 [W]       the cached second Gaussian, NaN when there is none
    /rng/numpy               uint32 [W, 625]   numpy.random.get_state(): keys and position
    /rng/numpy_gauss         float64 [W]       as python_gauss
    /rng/torch_cpu           uint8 [W, 5056]   torch.get_rng_state()
    /rng/torch_cuda          uint8 [W, 16]     of each rank's device; absent without CUDA
    /rng/megatron/NAME       uint8 [W, n]      streams of Megatron's CUDA RNG tracker

Generators made from counters (data order, sampling seeds, mini-batch shuffles) have no state here.
"""

import hashlib
import io
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from numpy.typing import NDArray

from hpc_rlhf.cluster import device
from hpc_rlhf.fs import publish


@dataclass(frozen=True, slots=True, kw_only=True)
class RngState:
    """Every random stream of one process."""

    python: NDArray[np.uint32]  # [625]
    python_gauss: float
    numpy: NDArray[np.uint32]  # [625]
    numpy_gauss: float
    torch_cpu: NDArray[np.uint8]
    torch_cuda: NDArray[np.uint8] | None
    megatron: Mapping[str, NDArray[np.uint8]]


def capture_rng() -> RngState:
    """Read this process's random streams."""
    _, python, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return RngState(
        python=np.array(python, np.uint32),
        python_gauss=math.nan if gauss is None else gauss,
        numpy=np.append(keys, position).astype(np.uint32),
        numpy_gauss=float(cached) if has_gauss else math.nan,
        torch_cpu=torch.get_rng_state().numpy(),
        torch_cuda=torch.cuda.get_rng_state().cpu().numpy() if _on_cuda() else None,
        megatron={
            name: state.cpu().numpy() for name, state in get_cuda_rng_tracker().get_states().items()
        },
    )


def restore_rng(state: RngState) -> None:
    """Set this process's random streams.

    Streams that do not exist on this kind of device (a checkpoint moved between CPU and CUDA) keep
    their present state.
    """
    python_gauss = None if math.isnan(state.python_gauss) else state.python_gauss
    random.setstate((3, tuple(int(word) for word in state.python), python_gauss))
    has_gauss = not math.isnan(state.numpy_gauss)
    np.random.set_state(
        (
            "MT19937",
            state.numpy[:-1],
            int(state.numpy[-1]),
            int(has_gauss),
            state.numpy_gauss if has_gauss else 0.0,
        )
    )
    torch.set_rng_state(torch.from_numpy(state.torch_cpu.copy()))
    if _on_cuda() and state.torch_cuda is not None:
        torch.cuda.set_rng_state(torch.from_numpy(state.torch_cuda.copy()))
    tracker = get_cuda_rng_tracker()
    present = tracker.get_states()
    for name, value in state.megatron.items():
        if name in present and present[name].numel() == value.size:
            present[name] = torch.from_numpy(value.copy())
    tracker.set_states(present)


def reseed(state: RngState, rank: int) -> None:
    """Seed the streams of a rank that the saved world did not have, from rank 0's streams.

    The seed is a hash of rank 0's saved streams and the rank, so that it is the same whenever the
    same checkpoint is loaded. Megatron's tracker keeps the streams it was initialised with.
    """
    text = state.python.tobytes() + state.torch_cpu.tobytes() + str(rank).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # CUDA's generators too


def restore_rank(states: Sequence[RngState], rank: int) -> None:
    """Restore rank ``rank`` of a world that may be larger or smaller than the saved one.

    A rank that was there continues its streams; a new one is seeded by :func:`reseed`.
    """
    if rank < len(states):
        restore_rng(states[rank])
    else:
        reseed(states[0], rank)


def write_state(path: Path, rng: Sequence[RngState], run_state: Mapping[str, Any]) -> None:
    """Write ``state.h5`` with the streams of all ranks, in rank order.

    Raises:
        OSError: it cannot be written.
        TypeError: ``run_state`` is not plain JSON data.
    """
    text = json.dumps(run_state)
    # In memory first: HDF5 hides the error of a full disk until it closes, or crashes there.
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        file["run_state"] = text
        group = file.create_group("rng")
        for name in ("python", "numpy", "torch_cpu"):
            group[name] = np.stack([getattr(state, name) for state in rng])
        for name in ("python_gauss", "numpy_gauss"):
            group[name] = np.array([getattr(state, name) for state in rng], np.float64)
        if rng[0].torch_cuda is not None:
            group["torch_cuda"] = np.stack([s.torch_cuda for s in rng if s.torch_cuda is not None])
        for name in rng[0].megatron:
            group[f"megatron/{name}"] = np.stack([state.megatron[name] for state in rng])
    publish(path, lambda target: target.write(image.getbuffer()))


def read_state(path: Path) -> tuple[list[RngState], dict[str, Any]]:
    """Read what :func:`write_state` wrote."""
    # Without a lock: the file never changes, and a filesystem without flock refuses them.
    with h5py.File(path, "r", locking=False) as file:
        run_state = json.loads(file["run_state"][()])
        rng = {name: value[()] for name, value in file["rng"].items() if name != "megatron"}
        streams = {name: value[()] for name, value in file.get("rng/megatron", {}).items()}
    world = len(rng["python"])
    return [
        RngState(
            python=rng["python"][r],
            python_gauss=float(rng["python_gauss"][r]),
            numpy=rng["numpy"][r],
            numpy_gauss=float(rng["numpy_gauss"][r]),
            torch_cpu=rng["torch_cpu"][r],
            torch_cuda=rng["torch_cuda"][r] if "torch_cuda" in rng else None,
            megatron={name: values[r] for name, values in streams.items()},
        )
        for r in range(world)
    ], run_state


def _on_cuda() -> bool:
    return device.device().type == "cuda"
