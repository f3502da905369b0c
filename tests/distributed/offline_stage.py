"""An offline stage as its component runs it, in forked ranks: no time is spent on imports."""

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.utils.tensorboard  # noqa: F401 - what every rank imports, once, before the forks
import transformers.models.auto.tokenization_auto  # noqa: F401

from hpc_rlhf.cluster.world import World
from hpc_rlhf.compose import compose
from hpc_rlhf.config import Config
from hpc_rlhf.fs import publish_json, read_json
from hpc_rlhf.launch.job_plan import JobPlan, plan_job
from hpc_rlhf.observe.timeline import Timeline
from hpc_rlhf.run_dir import Attempt, RunDir
from hpc_rlhf.runs import open_run, run_directory
from hpc_rlhf.stages.offline import run_learner
from tests.distributed.ranks import PR_SET_PDEATHSIG
from tests.e2e_compare import NOT_COMPARED
from tests.launch_driver import wait_until

RUN_TIMEOUT_S = 90
_NOT_COMPARED = (*NOT_COMPARED, "train/tokens_per_second")


@dataclass
class StageRun:
    """One run of a stage, of ``ranks`` ranks, with a root of the test's own."""

    root: Path
    name: str
    overrides: tuple[str, ...]
    ranks: int = 2
    pids: list[int] = field(default_factory=list)

    @property
    def config(self) -> Config:
        return compose([f"run.root={self.root}", f"run.name={self.name}", *self.overrides])

    @property
    def directory(self) -> RunDir:
        return run_directory(self.config)

    @contextmanager
    def started(self) -> Iterator[None]:
        """The next attempt, under way; whatever is left of it at the end is killed."""
        config = self.config
        run = open_run(config)
        plan = plan_job(config, run.path)
        attempt = run.new_attempt()
        publish_json(attempt.started, {"end_time": None})
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent = os.getpid()
        self.pids = []
        try:
            for rank in range(self.ranks):
                pid = os.fork()
                if not pid:  # leaves through os._exit only: nothing of pytest may run in it
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() != parent:
                        os._exit(1)
                    _run_rank(config, plan, attempt, self._world(rank, attempt))
                self.pids.append(pid)
            yield
        finally:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _world(self, rank: int, attempt: Attempt) -> World:
        return World(
            component="learner",
            rank=rank,
            size=self.ranks,
            local_rank=rank,
            node="localhost",
            job_id="local",
            attempt=attempt.number,
        )

    def wait(self) -> list[int]:
        """Exit codes of all ranks; -9 for one that was killed."""
        codes = []
        deadline = time.monotonic() + RUN_TIMEOUT_S
        for pid in list(self.pids):
            while True:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    break
                assert time.monotonic() < deadline, f"rank {len(codes)} did not end"
                time.sleep(0.005)
            self.pids.remove(pid)
            codes.append(os.waitstatus_to_exitcode(status))
        return codes

    def __call__(self) -> list[int]:
        """One attempt to its end."""
        with self.started():
            return self.wait()

    def kill(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.wait()

    def metrics(self) -> list[dict[str, Any]]:
        path = self.directory.metrics / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def compared(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in record.items() if not name.startswith(_NOT_COMPARED)}
            for record in self.metrics()
        ]

    def wait_step(self, step: int) -> None:
        wait_until(lambda: len(self.metrics()) >= step, f"step {step}", RUN_TIMEOUT_S)

    def wait_phase(self, step: int, phase: str) -> None:
        progress = self.directory.attempt(self.directory.attempt_numbers()[-1]).progress

        def reached() -> bool:
            found = read_json(progress) if progress.exists() else {}
            return (found.get("step"), found.get("phase")) == (step, phase)

        wait_until(reached, f"phase {phase} of step {step}", RUN_TIMEOUT_S)

    def weights_sha256(self) -> str:
        digest = hashlib.sha256()
        for file in sorted(self.directory.path.glob("*/model*.safetensors")):
            digest.update(file.read_bytes())
        return digest.hexdigest()


def _run_rank(config: Config, plan: JobPlan, attempt: Attempt, world: World) -> None:
    code = 1
    try:
        timeline = Timeline(attempt if world.rank == 0 else None)
        code = int(run_learner(config, plan, attempt, world, timeline))
    except BaseException:  # noqa: BLE001 - the parent sees the exit code, a person the traceback
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
