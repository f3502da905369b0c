import json
import time
from pathlib import Path

import pytest

from hpc_rlhf.observe.timeline import StepTimes, Timeline
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Phase


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "Clock":
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_second_of_a_step_is_in_the_books(clock: Clock) -> None:
    timeline = Timeline()
    with timeline.phase(0, Phase.SETUP):
        clock.now += 45
    with timeline.phase(1, Phase.SYNC):
        clock.now += 1
    for phase, seconds in ((Phase.ROLLOUT, 4), (Phase.TRAIN, 2), (Phase.SYNC, 1)):
        with timeline.phase(1, phase):
            clock.now += seconds
        clock.now += 0.5  # between the phases
    first = timeline.finish(1)
    assert first.seconds == {
        Phase.SETUP: 45,
        Phase.ROLLOUT: 4,
        Phase.TRAIN: 2,
        Phase.SYNC: 2,
    }
    assert first.total == 9.5  # of the step: set-up is the attempt's
    assert first.trainer_idle_fraction == pytest.approx(6 / 9.5)

    clock.now += 100  # writing the metrics is of no step
    with timeline.phase(2, Phase.TRAIN):
        clock.now += 3
    assert timeline.finish(2) == StepTimes(2, {Phase.TRAIN: 3}, 3)


def test_metric_names() -> None:
    times = StepTimes(7, {Phase.ROLLOUT: 3.0, Phase.TRAIN: 1.0}, 4.0)
    assert times.as_metrics() == {
        "time/rollout": 3.0,
        "time/train": 1.0,
        "time/step": 4.0,
        "trainer/idle_fraction": 0.75,
    }


def test_a_failure_is_in_the_phase_it_came_from() -> None:
    timeline = Timeline()
    assert timeline.current == (0, Phase.SETUP)
    with pytest.raises(ValueError, match="boom"), timeline.phase(3, Phase.SCORE):
        raise ValueError("boom")
    assert timeline.current == (3, Phase.SCORE)


def test_progress_is_published_by_whoever_has_the_attempt(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).new_attempt()
    timeline = Timeline(attempt)
    with timeline.phase(5, Phase.ROLLOUT):
        progress = json.loads(attempt.progress.read_text())
        assert (progress["step"], progress["phase"]) == (5, "rollout")
        assert abs(progress["time"] - time.time()) < 60
    with timeline.phase(5, Phase.TRAIN):
        assert json.loads(attempt.progress.read_text())["phase"] == "train"
    # nothing else is left beside it
    assert {path.name for path in attempt.path.iterdir()} == {
        "progress.json",
        "endpoints",
        "failures",
        "logs",
    }
