import time
from pathlib import Path

import pytest

from hpc_rlhf.fs import read_json
from hpc_rlhf.observe.startup import (
    FIRST_TOKEN,
    GROUPS,
    LOAD,
    SAMPLERS,
    SYNC,
    StartUp,
    StartUpReport,
    publish_report,
)
from hpc_rlhf.observe.timeline import Timeline
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Phase


class Clock:
    """One clock for all: it stands still until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now - 900)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_parts_follow_upon_each_other_and_add_up(clock: Clock) -> None:
    startup = StartUp(attempt_began=clock.now - 0.4)
    for part, seconds in ((GROUPS, 5.0), (LOAD, 0.5), (GROUPS, 1.0), (SAMPLERS, 0.25)):
        clock.now += seconds  # of the part before
        startup.begin(part)
    clock.now += 7
    startup.end()
    clock.now += 100
    startup.begin(SYNC)  # after the end nothing counts
    startup.end()
    assert startup.seconds() == pytest.approx(
        {"launch": 0.4, "imports": 5.0, GROUPS: 0.75, LOAD: 1.0, SAMPLERS: 7.0}
    )
    assert sum(startup.seconds().values()) == pytest.approx(0.4 + 13.75)


def test_an_end_that_is_heard_of_later(clock: Clock) -> None:
    startup = StartUp(clock.now)
    clock.now += 3
    startup.begin(FIRST_TOKEN)
    clock.now += 2
    first_token = clock.now
    clock.now += 1
    startup.begin("score")
    clock.now += 1
    startup.end(first_token)
    assert startup.seconds() == pytest.approx({"launch": 0, "imports": 3, FIRST_TOKEN: 2})


def test_a_clock_behind_the_supervisors_makes_no_negative_seconds(clock: Clock) -> None:
    startup = StartUp(clock.now + 30)
    startup.end(clock.now - 5)
    assert all(seconds >= 0 for seconds in startup.seconds().values())


def test_report(clock: Clock, tmp_path: Path) -> None:
    startup = StartUp(clock.now - 0.3)
    clock.now += 5.2
    startup.begin(SAMPLERS)
    clock.now += 9
    startup.begin(FIRST_TOKEN)
    clock.now += 0.01
    startup.end()
    attempt = RunDir(tmp_path).new_attempt()
    samplers = {"0": {"imports": 6.0, "engine": 7.0}, "1": {"imports": 6.25, "engine": 8.0}}
    report = publish_report(attempt, startup, samplers)
    assert str(report) == (
        "start-up 14.5 s: launch 0.3 | imports 5.2 | samplers 9.0 "
        "(beside: sampler-1, the slowest, in 14.2 s: imports 6.2 | engine 8.0)"
    )
    assert report.as_metrics() == pytest.approx(
        {
            "startup/seconds": 14.51,
            "startup/launch": 0.3,
            "startup/imports": 5.2,
            "startup/samplers": 9.0,
            "startup/first_token": 0.01,
        }
    )
    assert str(StartUpReport.from_json(read_json(attempt.startup))) == str(report)


def test_phases_after_set_up_are_parts_and_progress_shows_them(
    clock: Clock, tmp_path: Path
) -> None:
    attempt = RunDir(tmp_path).new_attempt()
    timeline = Timeline(attempt, StartUp(clock.now))
    with timeline.phase(0, Phase.SETUP):
        clock.now += 2
        timeline.part(GROUPS)
        clock.now += 1
        timeline.part(SAMPLERS)
        progress = read_json(attempt.progress)
        assert progress["phase"] == "setup"
        assert progress["startup"] == {"launch": 0, "imports": 2, "groups": 1, "samplers": 0}
    with timeline.phase(0, Phase.SYNC):
        clock.now += 1
    with timeline.phase(1, Phase.ROLLOUT):
        clock.now += 0.5
    timeline.startup.end()
    with timeline.phase(1, Phase.SCORE):
        assert "startup" not in read_json(attempt.progress)
    assert list(timeline.startup.seconds())[-2:] == [SYNC, FIRST_TOKEN]
