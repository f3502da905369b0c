import pytest

from hpc_rlhf.observe.eta import duration, seconds_a_step, seconds_left


def test_the_mean_of_the_newest_steps() -> None:
    records = [{"step": step, "time/step": 100.0 if step <= 10 else 2.0} for step in range(1, 31)]
    records[25]["time/step"] = 42.0  # a step that saved
    assert seconds_a_step(records) == 4.0
    assert seconds_left(records, 130) == 400.0
    assert seconds_left(records, 30) == 0.0
    assert seconds_left([], 30) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (8.4, "8 s"),
        (180, "3 min"),
        (7500, "2 h 05 min"),
        (47.9 * 3600, "47 h 54 min"),
        (76 * 3600, "3 d 4 h"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
