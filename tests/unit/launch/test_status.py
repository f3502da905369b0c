import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_rlhf.fs import publish_json
from hpc_rlhf.launch import status
from hpc_rlhf.launch.status import RunState, RunStatus, describe_run
from hpc_rlhf.run_dir import RunDir


class Queue:
    """Answers for squeue, and counts the questions."""

    def __init__(self) -> None:
        self.jobs: dict[str, list[str]] = {}
        self.asked: list[str] = []

    def __call__(self, job_id: str) -> list[str]:
        self.asked.append(job_id)
        return self.jobs.get(job_id, [])


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    monkeypatch.setattr(status, "queue_states", queue)
    return queue


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def submit(run: RunDir, job_id: str) -> None:
    (run.path / "submitit").mkdir(exist_ok=True)
    publish_json(run.path / "submitit" / "submitted.json", {"job_id": job_id, "time": time.time()})


def start(run: RunDir, job_id: str, **started: object) -> None:
    attempt = run.new_attempt()
    value = {"job_id": job_id, "host": "elsewhere", "pid": 1, "time": time.time(), **started}
    publish_json(attempt.path / "started.json", value)
    publish_json(attempt.progress, {"step": 4, "phase": "score", "time": 0.0})


def end(run: RunDir, exit_code: int) -> None:
    attempt = run.attempt(run.attempt_numbers()[-1])
    publish_json(attempt.ended, {"exit_code": exit_code, "reason": "because"})


def test_life_of_a_queued_run(run: RunDir, queue: Queue) -> None:
    assert describe_run(run) == RunStatus(RunState.NEW)
    submit(run, "12")
    queue.jobs["12"] = ["PENDING", "PENDING"]
    assert describe_run(run) == RunStatus(RunState.QUEUED, job_id="12")
    queue.jobs["12"] = ["RUNNING", "RUNNING"]
    start(run, "12")
    running = RunStatus(RunState.RUNNING, attempt=1, step=4, phase="score", job_id="12")
    assert describe_run(run) == running
    end(run, 75)
    queue.jobs["12"] = ["PENDING", "PENDING"]  # requeued
    assert describe_run(run).state is RunState.QUEUED
    queue.jobs.clear()
    assert describe_run(run).state is RunState.INTERRUPTED
    assert describe_run(run).reason == "because"
    submit(run, "15")
    queue.jobs["15"] = ["PENDING"]
    assert (describe_run(run).state, describe_run(run).job_id) == (RunState.QUEUED, "15")
    run.complete.touch()
    assert describe_run(run).state is RunState.COMPLETE
    assert set(queue.asked) == {"12", "15"}


def test_job_that_vanished(run: RunDir, queue: Queue) -> None:
    submit(run, "12")
    assert describe_run(run).state is RunState.FAILED
    assert "job 12 left the queue before" in (describe_run(run).reason or "")
    start(run, "12")
    assert describe_run(run).state is RunState.FAILED
    assert "without a word" in (describe_run(run).reason or "")


def test_local_run(run: RunDir, queue: Queue) -> None:
    here = os.uname().nodename
    start(run, "local-1", host=here, pid=os.getpid())
    assert describe_run(run).state is RunState.RUNNING
    end(run, 1)
    assert describe_run(run).state is RunState.FAILED
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    start(run, "local-2", host=here, pid=gone.pid)
    assert describe_run(run).state is RunState.FAILED
    assert describe_run(run).attempt == 2
    assert queue.asked == []
