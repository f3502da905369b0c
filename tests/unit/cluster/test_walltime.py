import math

import pytest

from hpc_rlhf.cluster.walltime import (
    Deadline,
    DurationEstimate,
    WalltimeGuard,
    by_this_clock,
)
from hpc_rlhf.types import Phase


def test_deadline() -> None:
    deadline = Deadline(end=1000.0, margin_s=30.0, now=lambda: 900.0)
    assert deadline.left_s == 70.0
    assert deadline.fits(70.0)
    assert not deadline.fits(70.1)
    assert Deadline(None).left_s == math.inf
    assert Deadline(None).fits(1e9)


def test_clock_of_this_node() -> None:
    assert by_this_clock(1000.0, job_start=400.0, script_start=400.9) == 1000.0
    assert by_this_clock(1000.0, job_start=400.0, script_start=700.0) == 1000.0  # a slow start
    assert by_this_clock(1000.0, job_start=400.0, script_start=100.0) == 700.0  # it is behind
    assert by_this_clock(1000.0, job_start=None, script_start=100.0) == 1000.0


@pytest.mark.parametrize(
    ("seconds", "p95"),
    [
        ([], 0.0),
        ([3.0], 3.0),
        ([3.0, 9.0, 4.0], 9.0),  # the longest, while there are few
        ([float(s) for s in range(1, 20)], 19.0),
        ([float(s) for s in range(1, 21)], 19.0),
        ([float(s) for s in range(1, 101)], 95.0),
        ([1000.0] + [1.0] * 99, 1.0),  # one that stalled is not waited for for ever
    ],
)
def test_p95(seconds: list[float], p95: float) -> None:
    estimate = DurationEstimate()
    for value in seconds:
        estimate.add(value)
    assert estimate.p95 == p95
    assert DurationEstimate(seconds).p95 == p95


def test_old_ones_are_forgotten() -> None:
    estimate = DurationEstimate([50.0, 1.0, 2.0], window=3)
    assert estimate.p95 == 50.0
    estimate.add(3.0)
    assert estimate.p95 == 3.0


def test_guard_keeps_room_for_the_phases_and_a_save() -> None:
    clock = [0.0]
    records = [
        {"step": 1, "time/train": 10.0, "time/sync": 1.0, "time/rollout": 40.0, "reward": 9.0},
        {"step": 2, "time/train": 12.0, "time/sync": None, "time/checkpoint": 13.0},
    ]
    guard = WalltimeGuard(Deadline(100.0, margin_s=5.0, now=lambda: clock[0]), records)
    assert guard.needed_s() == 13.0
    assert guard.needed_s(Phase.TRAIN, Phase.SYNC) == 26.0
    assert guard.needed_s("rollout", "train", "sync") == 66.0
    clock[0] = 69.0
    assert not guard.out_of_time(Phase.TRAIN, Phase.SYNC)
    clock[0] = 70.0
    assert guard.out_of_time(Phase.TRAIN, Phase.SYNC)
    assert not guard.out_of_time()
    assert guard.why(Phase.TRAIN, Phase.SYNC) == (
        "walltime: 25 s are left, train + sync + checkpoint take up to 26 s"
    )
    assert not WalltimeGuard(Deadline(None), records).out_of_time("rollout")
    guard.observe({"time/checkpoint": 0.5, "checkpoint/seconds": 31.0, "checkpoint/bytes": 1e9})
    assert guard.needed_s() == 31.0, "what is durable counts, not what the learner waited for"


def test_guard_that_knows_nothing_stops_only_at_the_end() -> None:
    clock = [94.0]
    guard = WalltimeGuard(Deadline(100.0, margin_s=5.0, now=lambda: clock[0]))
    assert not guard.out_of_time("train")
    guard.observe({"time/train": 2.0})
    assert guard.out_of_time("train")
    clock[0] = 92.0
    assert not guard.out_of_time("train")
    clock[0] = 96.0
    assert guard.out_of_time()
