"""What the table of a checkpoint's cost is made of."""

from tools.bench_checkpoint import Measured, _table, lost_work


def test_ratios_are_taken_pair_by_pair() -> None:
    measured = Measured(
        size=1_000_000_000,
        first=3.0,
        synchronous=[1.0, 2.0, 10.0],
        blocked=[0.1, 0.1, 0.2],  # 10 %, 5 %, 2 %
        published=[1.0, 2.0, 3.0],
        dd=[1.0, 1.0, 4.0],
    )
    rows = dict(line.strip("| ").split(" | ") for line in _table(measured, 800_000_000)[2:])
    assert rows["... against the minimum"] == "1.250"
    assert rows["synchronous save"] == "2.00 s"
    assert rows["... against the synchronous save, pair by pair"] == "5.0%"
    assert rows["write rate, hashing included"] == "500 MB/s"
    assert rows["... fraction"] == "50%"


def test_lost_tokens_are_those_that_were_dropped() -> None:
    records = [
        {"attempt": 1, "rollout/kept_tokens": 0, "rollout/dropped_tokens": 0},
        {"attempt": 2, "rollout/kept_tokens": 40, "rollout/dropped_tokens": 2},
        {"attempt": 2},
    ]
    assert lost_work(records) == [
        "3 steps by 2 attempts",
        "tokens of unfinished and finished samples found by a next attempt: 42",
        "... of them kept: 40",
        "... lost: 2",
    ]
