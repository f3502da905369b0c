"""Whatever is killed and resumed, every step has one value, in the JSONL and in TensorBoard."""

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_rlhf.observe.metrics import (
    METRICS_FILE,
    TENSORBOARD_DIRECTORY,
    MetricsWriter,
    read_metrics,
)
from hpc_rlhf.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.metrics.mkdir()
    return run


def _board(run: RunDir, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows for a run: every event of every file, doubles included."""
    board = EventAccumulator(str(run.metrics / TENSORBOARD_DIRECTORY), purge_orphaned_data=False)
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


def _attempt(run: RunDir, number: int, steps: range) -> None:
    writer = MetricsWriter(run)
    for step in steps:
        writer.write(step, number, {"reward/mean": step + number / 10})
    writer.close()


def test_one_record_a_step(run: RunDir) -> None:
    writer = MetricsWriter(run)
    writer.write(1, 1, {"reward/mean": 0.25, "kl": math.nan, "grad_norm": math.inf, "tokens": 7})
    (record,) = read_metrics(run)
    assert record.pop("time") > 0
    assert record == {
        "step": 1,
        "attempt": 1,
        "reward/mean": 0.25,
        "kl": None,
        "grad_norm": None,
        "tokens": 7.0,
    }
    json.loads((run.metrics / METRICS_FILE).read_text())  # strict JSON: no NaN in it
    assert _board(run, "reward/mean") == [(1, 0.25)]  # at once, not when the writer is closed
    writer.close()


def test_crash_at_7_and_resume_from_5(run: RunDir) -> None:
    _attempt(run, 1, range(1, 8))
    resumed = MetricsWriter(run)
    resumed.truncate(5)
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4, 5]
    resumed.close()
    _attempt(run, 2, range(6, 10))
    expected = [(step, step + (0.1 if step <= 5 else 0.2)) for step in range(1, 10)]
    assert [(r["step"], r["reward/mean"]) for r in read_metrics(run)] == expected
    assert _board(run, "reward/mean") == [(step, pytest.approx(value)) for step, value in expected]


def test_crash_before_the_first_checkpoint(run: RunDir) -> None:
    _attempt(run, 1, range(1, 4))
    _attempt(run, 2, range(1, 3))  # nothing to resume: nobody calls truncate
    assert [(r["step"], r["attempt"]) for r in read_metrics(run)] == [(1, 2), (2, 2)]
    assert [step for step, _ in _board(run, "reward/mean")] == [1, 2]


@pytest.mark.parametrize("rest", [b'{"step": 3, "attempt": 1, "rew', b"\x00" * 64, b"\xff\xfe\n"])
def test_what_a_kill_left_half_written_harms_nothing(run: RunDir, rest: bytes) -> None:
    _attempt(run, 1, range(1, 3))
    with (run.metrics / METRICS_FILE).open("ab") as file:
        file.write(rest)
    assert [record["step"] for record in read_metrics(run)] == [1, 2]
    _attempt(run, 2, range(3, 5))
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4]
    assert [step for step, _ in _board(run, "reward/mean")] == [1, 2, 3, 4]


def test_no_metrics_yet(run: RunDir) -> None:
    assert read_metrics(run) == []
    MetricsWriter(run).close()
    assert list(run.metrics.iterdir()) == []
