"""Preempts a run of real components at a chosen moment.

A phase of milliseconds is hit by stopping the learner's processes in it (SIGSTOP) until the request
to stop has reached one of them: it goes on where it was, with the signal pending.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from hpc_rlhf.checkpoint import manifest
from hpc_rlhf.checkpoint.save_point import BEGINNING, SavePoint
from hpc_rlhf.errors import ExitCode
from hpc_rlhf.fs import read_json
from hpc_rlhf.launch.srun import job_record
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Phase
from tests.e2e_driver import START_TIMEOUT_S
from tests.launch_driver import wait_until

GRACE_S = 30  # of the partition `low`
PHASES = (Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN, Phase.SYNC, Phase.CHECKPOINT)


@dataclass(frozen=True)
class Preemption:
    """What became of one."""

    taken: str  # the component whose node was taken
    phase: Phase
    step: int
    signal_s: float  # from queueing the job that preempts to the signal
    durable_s: float  # ... from the signal to the last byte of the checkpoint
    ended_s: float  # ... to the end of the attempt
    saved: SavePoint
    samples_left: int  # finished and unfinished ones in rollouts/partial.h5
    again_s: float  # from the end of the attempt to the beginning of the next


def preempt(run: RunDir, job: str, attempt: int, taken: str, phase: Phase) -> Preemption:
    """Take a node of ``taken`` from the run while ``attempt`` is in ``phase``."""
    before = newest(run)
    step, frozen = freeze(run, attempt, phase)
    node = nodes_of(run, attempt, taken)[0]
    queued = time.time()
    try:
        high = _output(
            *("sbatch", "--parsable", "--partition=high", f"--nodelist={node}", "--exclusive"),
            *("--job-name=preempts", "--output=/dev/null", "--wrap=sleep 5"),
        ).strip()
        wait_until(lambda: any(_is_signalled(pid) for pid in frozen), "Slurm's signal", GRACE_S)
        signalled = time.time()
    finally:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    ended = run.attempt(attempt).ended
    states: set[str] = set()

    def follow(condition: Path) -> bool:
        states.update(accounted(job))
        return condition.exists()

    wait_until(lambda: follow(ended), f"the end of attempt {attempt}", GRACE_S + 5)
    ending = read_json(ended)
    assert ending["exit_code"] == ExitCode.INTERRUPTED, ending
    following = run.attempt(attempt + 1).started
    wait_until(lambda: follow(following), "the next attempt", 120)
    assert "COMPLETED" not in states
    assert job_record(high).state in ("RUNNING", "COMPLETING", "COMPLETED"), "it has its node"
    saved = newest(run)
    return Preemption(
        taken=taken,
        phase=phase,
        step=step,
        signal_s=signalled - queued,
        durable_s=max(0.0, _written(run, saved) - signalled) if saved != before else 0.0,
        ended_s=ending["time"] - signalled,
        saved=saved,
        samples_left=_samples_left(run),
        again_s=read_json(following)["time"] - ending["time"],
    )


def freeze(run: RunDir, attempt: int, phase: Phase) -> tuple[int, list[int]]:
    """Stop the processes of a run in ``phase`` of its second step or later; return step and pids."""
    progress = run.attempt(attempt).progress
    began = run.attempt(attempt).started
    wait_until(began.exists, f"attempt {attempt}", 120)
    wait_until(
        lambda: progress.exists() and read_json(progress)["step"] > 1,
        f"a step of attempt {attempt}",
        START_TIMEOUT_S,
    )
    # the samplers, too: a rollout is to be in its middle still when the signal comes
    pids = (
        processes(run, "learner", "sampler")
        if phase is Phase.ROLLOUT
        else processes(run, "learner")
    )
    until = time.monotonic() + 60
    while True:
        at = read_json(progress)
        if at["phase"] == phase:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            if (now := read_json(progress))["phase"] == phase:
                return int(now["step"]), pids
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert time.monotonic() < until, f"phase {phase} was not met in 60 s"


def processes(run: RunDir, *components: str) -> list[int]:
    """Processes of components and their descendants, those of the learner first."""
    parents: dict[int, int] = {}
    found: list[int] = []
    for component in components:
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                parents[int(path.name)] = int(
                    (path / "stat").read_text().rpartition(")")[2].split()[1]
                )
                if (
                    words[1:4] == ["-m", "hpc_rlhf.launch.component", component]
                    and str(run.path) in words
                ):
                    found.append(int(path.name))
    for pid, parent in parents.items():
        ancestor = parent
        while ancestor in parents and ancestor not in found:
            ancestor = parents[ancestor]
        if ancestor in found and pid not in found:
            found.append(pid)
    return found


def newest(run: RunDir) -> SavePoint:
    points = manifest.save_points(run.checkpoints)
    return next(
        (p for p in points if manifest.problem(run.checkpoints / p.name) is None), BEGINNING
    )


def nodes_of(run: RunDir, attempt: int, component: str) -> list[str]:
    """The nodes on which a component ("learner"), or a replica of one ("sampler-0"), was started."""
    log = (run.attempt(attempt).path / "logs/supervisor.log").read_text()
    return re.findall(rf" {component}: started on (\S+)", log)[-1].split(",")


def accounted(job: str) -> list[str]:
    """States of a job's components, and of its earlier runs before it was requeued."""
    return _output("sacct", "-X", "-D", "-n", "-P", "-j", job, "-o", "State").split()


def _written(run: RunDir, saved: SavePoint) -> float:
    return (run.checkpoints / saved.name / manifest.MANIFEST).stat().st_mtime


def _samples_left(run: RunDir) -> int:
    from hpc_rlhf.rollout import store

    return len(store.read_step(run.partial_rollout)[0]) if run.partial_rollout.exists() else 0


def _is_signalled(pid: int) -> bool:
    """Whether a stopped process has a request to stop pending, or was told to go on with one."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    pending = int(re.search(r"ShdPnd:\t(\w+)", status)[1], 16)
    asked = any(pending >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGUSR2))
    return asked or "State:\tT" not in status


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
