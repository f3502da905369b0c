"""Names and order of save points, and which may go."""

import pytest

from hpc_rlhf.checkpoint.save_point import SavePoint, outlived

POINTS = [SavePoint(10), SavePoint(12), SavePoint(10, 2), SavePoint(7), SavePoint(5), SavePoint(0)]


@pytest.mark.parametrize(
    ("keep", "every", "expected"),
    [
        (0, 0, []),
        (0, 3, []),
        (1, 0, ["10+2", "10", "7", "5", "0"]),
        (2, 0, ["10", "7", "5", "0"]),
        (1, 5, ["10+2", "7"]),
        (3, 7, ["5"]),
        (9, 0, []),
    ],
)
def test_the_newest_and_every_so_many_stay(keep: int, every: int, expected: list[str]) -> None:
    assert [str(point) for point in outlived(POINTS, keep, every)] == expected


def test_names_are_read_back_and_nothing_else_is() -> None:
    for point in POINTS:
        assert SavePoint.parse(point.name) == point
    for name in ("step_", ".step_3.tmp-1-aa", "step_3+", "step_-1", "step_3.old"):
        assert SavePoint.parse(name) is None
