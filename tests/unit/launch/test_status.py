import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rlhf.cli import main
from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import publish_json
from hpc_rlhf.launch import status
from hpc_rlhf.launch.srun import JobLine, parse_sacct, parse_squeue
from hpc_rlhf.launch.status import RunState, RunStatus, check_not_queued, describe_run
from hpc_rlhf.observe.metrics import MetricsWriter
from hpc_rlhf.run_dir import RunDir


class Queue:
    """Answers for squeue and sacct, and counts the questions."""

    def __init__(self) -> None:
        self.jobs: dict[str, list[str]] = {}
        self.accounted: list[JobLine] = []
        self.asked: list[str] = []

    def __call__(self, job_id: str) -> list[JobLine]:
        self.asked.append(job_id)
        return self.lines(job_id)

    def lines(self, job_id: str) -> list[JobLine]:
        states = self.jobs.get(job_id, [])
        return [JobLine(f"{job_id}+{i}", state, "(Priority)") for i, state in enumerate(states)]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    monkeypatch.setattr(status, "queue_lines", queue)
    monkeypatch.setattr(status, "accounted_lines", lambda job_id: queue.accounted)
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


def test_a_run_is_not_queued_twice(run: RunDir, queue: Queue) -> None:
    check_not_queued(run)
    submit(run, "12")
    queue.jobs["12"] = ["PENDING"]
    with pytest.raises(UserError, match="job 12 is queued for it; wait for it, or cancel it first"):
        check_not_queued(run)
    queue.jobs.clear()  # it left the queue: its dependency failed, say
    check_not_queued(run)


def test_all_runs_in_a_line_each(
    tmp_path: Path, queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--root", str(tmp_path / "runs")]) == 0
    assert (
        capsys.readouterr().out
        == f"no run in {tmp_path / 'runs'}; --root says where else to look\n"
    )
    runs = {name: RunDir(tmp_path / "runs" / name) for name in ("a", "b", "broken", ".assets")}
    for age, (name, run) in enumerate(runs.items()):
        run.path.mkdir(parents=True)
        run.config.write_text("stage: sft\nrun: {steps: 40}\n" if name != "broken" else "stage: [")
        start(run, "local-1")
        end(run, 75)
        when = time.time() - 3600 * age - 7200
        for path in (run.config, run.attempt(1).started, run.attempt(1).progress):
            os.utime(path, (when, when))
        os.utime(run.attempt(1).ended, (when, when))
    runs["broken"].attempt(1).ended.write_text("")
    runs["b"].complete.touch()
    os.utime(runs["broken"].attempt(1).ended, (1, 1))
    assert main(["status", "--root", str(tmp_path / "runs")]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "stage", "state", "step", "last", "active"]
    assert rows[0].startswith("broken  ?      unknown: ")
    assert [row.split() for row in rows[1:]] == [
        ["b", "sft", "complete", "4", "of", "40", "3", "h", "00", "min", "ago"],
        ["a", "sft", "interrupted", "4", "of", "40", "2", "h", "00", "min", "ago"],
    ]


def test_what_is_left_of_a_run_that_goes_on(
    run: RunDir, queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    run.config.write_text("stage: online\nrun: {steps: 44}\n")
    start(run, "local-1", host=os.uname().nodename, pid=os.getpid())
    writer = MetricsWriter(run)
    run.metrics.mkdir()
    for step in range(1, 5):
        writer.write(step, 1, {"time/step": 4.5})
    writer.close()
    assert main(["status", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert "step     4 of 44\n" in printed
    assert "left     about 3 min, at 4.5 s a step\n" in printed


def test_life_of_a_queued_run(run: RunDir, queue: Queue) -> None:
    assert describe_run(run) == RunStatus(RunState.NEW)
    submit(run, "12")
    queue.jobs["12"] = ["PENDING", "PENDING"]
    lines = tuple(queue.lines("12"))
    assert describe_run(run) == RunStatus(RunState.QUEUED, job_id="12", slurm=lines)
    queue.jobs["12"] = ["RUNNING", "RUNNING"]
    start(run, "12")
    running = RunStatus(RunState.RUNNING, attempt=1, step=4, phase="score", job_id="12")
    assert describe_run(run) == replace(running, slurm=tuple(queue.lines("12")))
    end(run, 75)
    queue.jobs["12"] = ["PENDING", "PENDING"]  # requeued
    assert describe_run(run).state is RunState.QUEUED
    queue.jobs.clear()
    queue.accounted = [JobLine("12+0", "TIMEOUT"), JobLine("12+1", "CANCELLED by 0")]
    assert describe_run(run).state is RunState.INTERRUPTED
    assert describe_run(run).slurm == tuple(queue.accounted)
    assert describe_run(run).reason == "because"
    submit(run, "15")
    queue.jobs["15"] = ["PENDING"]
    assert (describe_run(run).state, describe_run(run).job_id) == (RunState.QUEUED, "15")
    run.complete.touch()
    assert describe_run(run).state is RunState.COMPLETE
    assert set(queue.asked) == {"12", "15"}


def test_what_squeue_says() -> None:
    text = """\
12+1|PENDING|None|N/A|
12+0|PENDING|Resources|2026-12-24T18:00:00|
"""
    assert [str(line) for line in parse_squeue(text)] == [
        "12+0 PENDING (Resources, expected to start 2026-12-24T18:00:00)",
        "12+1 PENDING (None)",
    ]
    assert [
        str(line) for line in parse_squeue("7|RUNNING|None|2026-12-24T18:00:00|node[1-2]\n")
    ] == ["7 RUNNING on node[1-2]"]
    reason = "QOSMaxGRESPerUser|N/A"
    assert str(parse_squeue(f"7|PENDING|{reason}|")[0]) == "7 PENDING (QOSMaxGRESPerUser)"
    assert parse_squeue("") == []


def test_what_sacct_says() -> None:
    text = "12+0|FAILED|1:0\n12+1|CANCELLED by 1000|0:15\n12+2|COMPLETED|0:0\n"
    assert [str(line) for line in parse_sacct(text)] == [
        "12+0 FAILED (exit code 1)",
        "12+1 CANCELLED by 1000 (signal 15)",
        "12+2 COMPLETED",
    ]


def test_status_prints_both_components(
    run: RunDir, queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "config.yaml").touch()
    submit(run, "12")
    queue.jobs["12"] = ["PENDING", "PENDING"]
    assert main(["status", str(run.path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "state    queued",
        "job      12",
        "slurm    12+0 PENDING (Priority)",
        "         12+1 PENDING (Priority)",
        f"run      {run.path}",
    ]


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
