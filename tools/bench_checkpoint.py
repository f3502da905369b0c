"""Measures a checkpoint: its bytes, how long the learner is blocked, how fast it is written.

Run from the repository's root::

    python -m tools.bench_checkpoint --directory /scratch/somewhere

A randomly initialised model of ``--layers`` and ``--hidden`` on gloo ranks of this machine, or with
``--gpu`` on one rank on its GPU, learns two batches, so that the optimizer has its moments, and is saved in turns: synchronously, and with a
wait that comes after the learner would have gone on. Medians of ``--repeats``, after a first save
of each kind that is not counted (memory is touched for the first time then).

The minimum is counted per trained parameter as weights + master weights + two moments: in bf16
2 + 4 + 4 + 4 = 14 bytes; in fp32 4 + 4 + 4 + 4 = 16, since Megatron stores the master weights there
too, although they equal the weights (without them 12).
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from hpc_rlhf.checkpoint.manager import CheckpointManager
from hpc_rlhf.checkpoint.save_point import SavePoint
from hpc_rlhf.cluster import device
from hpc_rlhf.config import AlgorithmConfig, ParallelConfig
from hpc_rlhf.data.tiny import make_tiny_model
from hpc_rlhf.learner.algorithms import make_algorithm
from hpc_rlhf.run_dir import RunDir
from tests.distributed.learner_fixtures import experience, make_trainer
from tests.distributed.ranks import run_ranks

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Measured:
    """Seconds, the slowest rank's."""

    synchronous: list[float]
    blocked: list[float]  # of the asynchronous save, until it returned
    gathered: list[float]  # of these, Megatron's gathering of the sharded state
    written: list[float]  # until it was published


def main() -> None:
    options = _parser().parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.directory))
    try:
        for line in _rows(options, directory):
            print(line)
    finally:
        subprocess.run(["rm", "-rf", str(directory)], check=True)


def _rows(options: argparse.Namespace, directory: Path) -> list[str]:
    model = make_tiny_model(
        directory / "model",
        hidden=options.hidden,
        layers=options.layers,
        heads=options.hidden // 64,
        head_dim=64,
    )
    parameters = _count(model)
    parallel = ParallelConfig(tensor=options.tensor, pipeline=options.pipeline)
    run = RunDir(directory / "run")

    def measure() -> Measured:
        return _measure(model, run, parallel, _DTYPES[options.dtype], options.repeats)

    if options.gpu:
        measured = _on_gpu(measure, directory / "store")
    else:
        world = options.tensor * options.pipeline * options.data
        measured = run_ranks(measure, world, timeout_s=900)[0]
    newest = max(run.checkpoints.iterdir(), key=lambda path: path.stat().st_mtime)
    size = sum(file.stat().st_size for file in newest.iterdir())
    minimum = parameters * (16 if options.dtype == "fp32" else 14)
    dd = [_dd(directory, size) for _ in range(options.repeats)]
    sync, blocked, gathered, written = (
        statistics.median(seconds)
        for seconds in (
            measured.synchronous,
            measured.blocked,
            measured.gathered,
            measured.written,
        )
    )
    rate = size / sync
    layout = f"TP={options.tensor} PP={options.pipeline} DP={options.data}"
    if options.gpu:
        layout = "one GPU"
    return [
        (
            f"{parameters / 1e6:.1f} M parameters, {options.dtype}, {layout}, "
            f"medians of {options.repeats}"
        ),
        "",
        "| | |",
        "|---|---|",
        f"| bytes | {size / 1e6:.1f} MB |",
        (
            f"| ... against the minimum of {minimum // parameters} bytes a parameter | "
            f"{size / minimum:.3f} |"
        ),
        f"| synchronous save | {sync:.2f} s |",
        f"| asynchronous save, the learner is blocked | {blocked:.2f} s |",
        f"| ... of that gathering the optimizer's state | {gathered:.2f} s |",
        f"| ... against the synchronous save | {blocked / sync:.1%} |",
        f"| asynchronous save, until it is published | {written:.2f} s |",
        f"| write rate of the synchronous save, hashing included | {rate / 1e6:.0f} MB/s |",
        (
            f"| ... against dd with fsync ({size / statistics.median(dd) / 1e6:.0f} MB/s) | "
            f"{rate * statistics.median(dd) / size:.0%} |"
        ),
    ]


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
        trainer.update(algorithm, batch)
    manager = CheckpointManager(run, keep=1)
    measured = Measured([], [], [], [])
    for step in range(2 * (repeats + 1)):
        dist.barrier()
        began = time.perf_counter()
        if step % 2:
            manager.save(SavePoint(step), trainer, {})
            measured.synchronous.append(_slowest(time.perf_counter() - began))
            continue
        manager.save(SavePoint(step), trainer, {}, wait=False)
        measured.blocked.append(_slowest(time.perf_counter() - began))
        manager.wait()
        measured.written.append(_slowest(time.perf_counter() - began))
        dist.barrier()
        began = time.perf_counter()
        trainer.sharded_state_dict(is_loading=False)
        measured.gathered.append(_slowest(time.perf_counter() - began))
    return Measured(
        measured.synchronous[1:], measured.blocked[1:], measured.gathered[1:], measured.written[1:]
    )


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
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--data", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one rank, on this machine's GPU")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="fp32")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
