import xml.etree.ElementTree as ET

import pytest

from tools.over_optimisation import Point, _ticks, describe, draw, smooth, table

CURVE = [
    Point(3, step, kl=0.01 * step**2, proxy=step / 10, gold=0.2 + 0.1 * (5 - abs(5 - step)))
    for step in range(1, 11)
]


def test_running_means_are_cut_at_the_ends() -> None:
    assert smooth([1.0, 2.0, 3.0, 4.0, 9.0, 0.0]) == pytest.approx(
        [2.0, 2.5, 3.8, 3.6, 4.0, 13 / 3]
    )


def test_the_peak_is_named() -> None:
    text = describe(CURVE)
    assert text.startswith("seed 3: proxy 0.20 -> 0.50 -> 0.90, gold 0.40 -> 0.58 (step 5, KL 0.3)")
    assert text.endswith("-> 0.30 (KL 0.8)")


def test_the_table_has_a_line_a_step() -> None:
    lines = table(CURVE).splitlines()
    assert lines[:2] == ["seed,step,kl,proxy,gold", "3,1,0.0100,0.1000,0.3000"]
    assert len(lines) == 11


def test_the_figure_is_whole_and_within_its_frame() -> None:
    root = ET.fromstring(draw(CURVE))
    svg = "{http://www.w3.org/2000/svg}"
    lines = [line.get("points", "") for line in root.iter(f"{svg}polyline")]
    assert len(lines) == 6  # in each panel the axes, and two curves
    for line, (left, right) in zip(lines, [(60, 410)] * 3 + [(530, 880)] * 3, strict=True):
        for point in line.split():
            x, y = map(float, point.split(","))
            assert left <= x <= right
            assert 60 <= y <= 350
    dots = [path.get("d", "").count("M") for path in root.iter(f"{svg}path")]
    assert dots == [len(CURVE)] * 4
    texts = [text.text for text in root.iter(f"{svg}text")]
    assert texts.count("gold: right answers") == 2


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 118, [0, 20, 40, 60, 80, 100, 120]), (-0.3, 1.4, [-0.5, 0.0, 0.5, 1.0, 1.5])],
)
def test_ticks_are_round_and_enclose_what_is_drawn(
    low: float, high: float, ticks: list[float]
) -> None:
    assert _ticks(low, high) == pytest.approx(ticks)
