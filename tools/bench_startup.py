"""Measure the start of an attempt: run it, wait for its first token, stop it, and again.

    python tools/bench_startup.py --attempts 5 [OVERRIDES]

Prints a line an attempt, and the median of every part. The first attempt of a run prepares (warm-up,
caches) what the others find, so it is listed and left out of the medians.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from hpc_rlhf.fs import read_json
from hpc_rlhf.observe.startup import StartUpReport
from hpc_rlhf.run_dir import RunDir

TIMEOUT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attempts", type=int, default=5)
    parser.add_argument("overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        run = RunDir(Path(root) / "startup")
        overrides = [
            *("experiment=quickstart", f"run.root={root}", "run.name=startup"),
            *("run.steps=100000", "checkpoint.every_steps=1", *arguments.overrides),
        ]
        reports, used = [], []
        for _ in range(arguments.attempts + 1):
            report, cpu = measure(run, overrides)
            reports.append(report)
            used.append(cpu)
            print(f"{report}; {cpu:.1f} s of CPU", flush=True)
            # what the stop left half sampled is not to shorten the next start
            (run.rollouts / "partial.h5").unlink(missing_ok=True)
    show(reports[1:], used[1:])


def measure(run: RunDir, overrides: Sequence[str]) -> tuple[StartUpReport, float]:
    """Start an attempt, stop it behind its first token; return its own report and its CPU seconds."""
    number = max(run.attempt_numbers(), default=0) + 1
    attempt = run.attempt(number)
    command = [str(Path(sys.executable).with_name("hpc-rlhf")), "run", *overrides]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT_S
    while not attempt.startup.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"attempt {number} did not start; see {attempt.path}/logs")
        time.sleep(0.1)
    cpu = cpu_seconds(process.pid)
    os.kill(process.pid, signal.SIGINT)
    process.wait(TIMEOUT_S)
    return StartUpReport.from_json(read_json(attempt.startup)), cpu


def cpu_seconds(pid: int) -> float:
    """User and system seconds that the attempt's processes have used by now."""
    total = 0.0
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def show(reports: Sequence[StartUpReport], cpu: Sequence[float]) -> None:
    print(f"\nmedian of {len(reports)} resumed attempts, seconds (least to most)")
    print(row("start-up", [report.seconds for report in reports]))
    print(row("CPU seconds of all processes", cpu))
    for title, parts in (
        ("coordinator", [report.parts for report in reports]),
        ("sampler-0", [report.samplers["0"] for report in reports]),
    ):
        for part in dict.fromkeys(part for each in parts for part in each):
            print(row(f"  {title}: {part}", values(parts, part)))


def values(parts: Sequence[Mapping[str, float]], part: str) -> list[float]:
    return [each.get(part, 0.0) for each in parts]


def row(name: str, numbers: Sequence[float]) -> str:
    middle = statistics.median(numbers)
    return f"{name:28} {middle:6.1f}  ({min(numbers):.1f} to {max(numbers):.1f})"


if __name__ == "__main__":
    main()
