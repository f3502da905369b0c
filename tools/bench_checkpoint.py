"""Measures a checkpoint: its bytes, how long the learner is blocked, how fast it is written.

Run from the repository's root::

    python -m tools.bench_checkpoint --directory /scratch/somewhere
    python -m tools.bench_checkpoint --lost-in runs/NAME

A randomly initialised model of ``--layers`` and ``--hidden``, on gloo ranks of this machine or with
``--gpu`` on one rank on its GPU, learns two batches, so that the optimizer has its moments, and is
saved in turns: with a wait that comes after the learner would have gone on, and synchronously.
Medians of ``--repeats``, after a first save that is not among them: it touches the memory for the
first time, and asks all ranks who writes what. ``dd`` writes as many bytes to the same directory
after every pair of saves.

The minimum is counted per trained parameter as weights + master weights + two moments: in bf16
2 + 4 + 4 + 4 = 14 bytes; in fp32 4 + 4 + 4 + 4 = 16, since Megatron stores the master weights there
too, although they equal the weights (without them 12).

With ``--lost-in`` it reads what stops in the middle of a step have cost a run, from its metrics.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from hpc_rlhf.checkpoint.manager import CheckpointManager
from hpc_rlhf.checkpoint.save_point import SavePoint
from hpc_rlhf.cluster import device
from hpc_rlhf.config import AlgorithmConfig, ParallelConfig
from hpc_rlhf.data.tiny import make_tiny_model
from hpc_rlhf.learner.algorithms import make_algorithm
from hpc_rlhf.observe.metrics import read_metrics
from hpc_rlhf.run_dir import RunDir
from tests.distributed.learner_fixtures import experience, make_trainer, update
from tests.distributed.ranks import run_ranks

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MINIMUM = {"fp32": 16, "bf16": 14}  # bytes a parameter


@dataclass
class Measured:
    """Seconds, the slowest rank's."""

    size: int = 0  # bytes of one checkpoint
    first: float = 0.0  # of the first save, until it returned
    synchronous: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)  # of the asynchronous save
    published: list[float] = field(default_factory=list)  # of the asynchronous save
    dd: list[float] = field(default_factory=list)


def main() -> None:
    options = _parser().parse_args()
    if options.lost_in is not None:
        print("\n".join(lost_work(read_metrics(RunDir(options.lost_in)))))
        return
    directory = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.directory))
    try:
        print("\n".join(_measure_all(options, directory)))
    finally:
        shutil.rmtree(directory)


def lost_work(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stops in the middle of steps cost, from the metrics of a run."""
    found = {
        name: int(sum(record.get(f"rollout/{name}_tokens") or 0 for record in records))
        for name in ("kept", "dropped")
    }
    attempts = len({record["attempt"] for record in records})
    return [
        f"{len(records)} steps by {attempts} attempts",
        f"tokens of unfinished and finished samples found by a next attempt: {sum(found.values())}",
        f"... of them kept: {found['kept']}",
        f"... lost: {found['dropped']}",
    ]


def _measure_all(options: argparse.Namespace, directory: Path) -> list[str]:
    model = make_tiny_model(
        directory / "model",
        hidden=options.hidden,
        layers=options.layers,
        heads=options.hidden // 64,
        head_dim=64,
    )
    parallel = ParallelConfig(tensor=options.tensor, pipeline=options.pipeline)
    run = RunDir(directory / "run")

    def measure() -> Measured:
        return _measure(model, run, parallel, _DTYPES[options.dtype], options.repeats)

    load = os.getloadavg()[0]
    if options.gpu:
        measured, layout = _on_gpu(measure, directory / "store"), "one GPU"
    else:
        world = options.tensor * options.pipeline * options.data
        measured = run_ranks(measure, world, timeout_s=1800)[0]
        layout = f"TP={options.tensor} PP={options.pipeline} DP={options.data}"
    parameters = _count(model)
    return [
        (
            f"{parameters / 1e6:.1f} M parameters, {options.dtype}, {layout}, "
            f"medians of {options.repeats}, load before: {load:.1f}"
        ),
        "",
        *_table(measured, parameters * _MINIMUM[options.dtype]),
    ]


def _table(measured: Measured, minimum: int) -> list[str]:
    size = measured.size
    synchronous, blocked, published, dd = (
        statistics.median(seconds)
        for seconds in (measured.synchronous, measured.blocked, measured.published, measured.dd)
    )
    ratio = statistics.median(
        one / other for one, other in zip(measured.blocked, measured.synchronous, strict=True)
    )
    rows = {
        "bytes": f"{size / 1e6:.1f} MB",
        "... against the minimum": f"{size / minimum:.3f}",
        "synchronous save": f"{synchronous:.2f} s",
        "asynchronous save, the learner is blocked": f"{blocked:.3f} s",
        "... against the synchronous save, pair by pair": f"{ratio:.1%}",
        "... by the first save of a process": f"{measured.first:.2f} s",
        "asynchronous save, until it is published": f"{published:.2f} s",
        "write rate, hashing included": f"{size / synchronous / 1e6:.0f} MB/s",
        "... of dd with fsync": f"{size / dd / 1e6:.0f} MB/s",
        "... fraction": f"{dd / synchronous:.0%}",
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _on_gpu(measure: Callable[[], Measured], store: Path) -> Measured:
    device.prepare_process()
    dist.init_process_group(device.backend(), init_method=f"file://{store}", rank=0, world_size=1)
    measured = measure()
    dist.destroy_process_group()
    return measured


def _measure(
    model: Path, run: RunDir, parallel: ParallelConfig, dtype: torch.dtype, repeats: int
) -> Measured:
    trainer = make_trainer(model, parallel, dtype=dtype)
    algorithm = make_algorithm(AlgorithmConfig())
    batch = experience(model)
    for _ in range(2):
        update(trainer, algorithm, batch)
    manager = CheckpointManager(run, keep=1)
    measured = Measured()
    for step in range(1, 2 * repeats + 2):
        dist.barrier()
        began = time.perf_counter()
        if step > 1 and step % 2:
            manager.save(SavePoint(step), trainer, {})
            measured.synchronous.append(_slowest(time.perf_counter() - began))
            seconds = _dd(run.path, measured.size) if dist.get_rank() == 0 else 0.0
            measured.dd.append(_slowest(seconds))
            continue
        manager.save(SavePoint(step), trainer, {}, wait=False)
        device.synchronize()  # the copy from a GPU is queued only
        blocked = _slowest(time.perf_counter() - began)
        manager.wait()
        published = _slowest(time.perf_counter() - began)
        if step == 1:
            measured.first = blocked
            cost = manager.take_cost()
            assert cost is not None
            measured.size = cost.bytes
        else:
            measured.blocked.append(blocked)
            measured.published.append(published)
    return measured


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64, device=device.device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def _count(model: Path) -> int:
    """Trained parameters of a Hugging Face directory."""
    count = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            count += sum(torch.Size(file.get_slice(k).get_shape()).numel() for k in file.keys())  # noqa: SIM118
    return count


def _dd(directory: Path, size: int) -> float:
    """Seconds in which dd writes as many bytes to the same filesystem, and fsyncs them."""
    file = directory / "dd"
    command = ["dd", "if=/dev/zero", f"of={file}", "bs=4M", "conv=fsync", "status=none"]
    began = time.perf_counter()
    subprocess.run([*command, f"count={size}", "iflag=count_bytes"], check=True)
    seconds = time.perf_counter() - began
    file.unlink()
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(), help="where checkpoints will go")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--data", type=int, default=2)
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="fp32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpu", action="store_true", help="one rank, on this machine's GPU")
    parser.add_argument("--lost-in", type=Path, metavar="RUN", help="read a run's metrics instead")
    return parser


if __name__ == "__main__":
    main()
