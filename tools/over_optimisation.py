"""Measures over-optimisation of a reward model, and draws it into docs/over_optimisation.svg and .csv.

After Gao, Schulman and Hilton, "Scaling Laws for Reward Model Overoptimization" (2210.10760), figure 1: a
policy learns from a proxy, a reward model of few and partly wrong pairs, and is judged by the gold rule
that the pairs were made by. What the proxy says rises throughout; what the rule says rises, peaks and
falls. The abscissa is the square root of the KL divergence from the policy that training began with,
and once more the step.

Run from the repository's root: ``python -m tools.over_optimisation``. Runs in ``--root`` that are there are
resumed, or only read if they are complete.
"""

import argparse
import csv
import io
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np

from hpc_rlhf.chain import Link, compose_links
from hpc_rlhf.data.tiny import byte_level_tokenizer
from hpc_rlhf.fs import publish_text
from hpc_rlhf.observe.metrics import read_metrics
from hpc_rlhf.rollout import store

DOCS = Path(__file__).parents[1] / "docs"
NAME = "over_optimisation"
OVERRIDES = (
    "experiment=quickstart_ppo",
    "assets.directory=${run.root}/.assets/over_optimisation-${run.seed}",
    "assets.correct_fraction=0.5",
    "assets.pairs=400",
    "assets.wrong_labels=0.2",
    "cluster.learner.tasks_per_node=1",
    "learner.parallel.tensor=1",
    "chain.reward_model.run.steps=100",
    "chain.reward_model.offline.batch_size=40",
    "chain.ppo.run.steps=200",
    "chain.ppo.run.prompts_per_step=100",  # all that there are, so that batches differ by samples only
    "chain.ppo.sampling.samples_per_prompt=4",
    "chain.ppo.learner.optimizer.lr=1e-4",
    "chain.ppo.algorithm.kl.coef=0.001",
)
SMOOTHING = 5  # steps of the running means that are drawn


@dataclass(frozen=True)
class Point:
    """One step's batch, sampled from the policy before it learned from it."""

    seed: int
    step: int
    kl: float  # nats a completion
    proxy: float  # mean score, in standard deviations of the first policy's above its mean
    gold: float  # fraction of right answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", default="runs", help="where the runs are")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="for the runs, after those of this file")
    arguments = parser.parse_intermixed_args()
    points: list[Point] = []
    for seed in arguments.seeds:
        name = [f"run.root={arguments.root}", f"run.seed={seed}", f"run.name={NAME}-{seed}"]
        overrides = [*OVERRIDES, *arguments.overrides, *name]
        command = [sys.executable, "-m", "hpc_rlhf.cli", "run", *overrides]
        subprocess.run(command, check=True)
        points += measure(compose_links(overrides)[-1], seed)
    publish_text(DOCS / f"{NAME}.csv", table(points))
    publish_text(DOCS / f"{NAME}.svg", draw(points))
    for seed in arguments.seeds:
        print(describe([point for point in points if point.seed == seed]))


def measure(link: Link, seed: int) -> list[Point]:
    """Proxy and gold of every step of a PPO run, from the samples that it keeps."""
    tokenizer = byte_level_tokenizer()
    points = []
    mean, std = 0.0, 1.0
    for record in read_metrics(link.run):
        step = int(record["step"])
        rollouts, scores = store.read_step(link.run.rollouts / f"step_{step}.h5")
        assert scores is not None
        if not points:
            mean, std = float(scores.rewards.mean()), float(scores.rewards.std())
        texts = [tokenizer.decode(r.completion.token_ids.tolist()) for r in rollouts]
        right = [t == r.prompt.answer for t, r in zip(texts, rollouts, strict=True)]
        proxy = (float(scores.rewards.mean()) - mean) / std
        points.append(Point(seed, step, record["kl_sequence"], proxy, float(np.mean(right))))
    return points


def table(points: Sequence[Point]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Point)])
    for point in points:
        writer.writerow([f"{v:.4f}" if isinstance(v, float) else v for v in astuple(point)])
    return text.getvalue()


def smooth(values: Sequence[float]) -> list[float]:
    """Means over windows of :data:`SMOOTHING`, which are cut at both ends."""
    half = SMOOTHING // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def describe(points: Sequence[Point]) -> str:
    """One seed's curve in words."""
    proxy, gold = (smooth([getattr(p, name) for p in points]) for name in ("proxy", "gold"))
    kl = smooth([p.kl for p in points])
    peak = max(range(len(gold)), key=gold.__getitem__)
    return (
        f"seed {points[0].seed}: proxy {proxy[0]:.2f} -> {proxy[peak]:.2f} -> {proxy[-1]:.2f}, "
        f"gold {gold[0]:.2f} -> {gold[peak]:.2f} (step {points[peak].step}, KL {kl[peak]:.1f}) -> "
        f"{gold[-1]:.2f} (KL {kl[-1]:.1f})"
    )


# ------------------------------------------------------------------------------------------ drawing

WIDTH, HEIGHT = 940, 400
MARGIN_X, TOP, BOTTOM = 60, 60, 50
PROXY_COLOUR, GOLD_COLOUR = "#7a3fa0", "#c98a00"


@dataclass(frozen=True)
class Panel:
    """A rectangle of the figure, addressed in fractions of its axes."""

    left: float
    width: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        return self.left + x * self.width, TOP + (1 - y) * (HEIGHT - TOP - BOTTOM)


def draw(points: Sequence[Point]) -> str:
    """The curves of all seeds as SVG, over the square root of KL and over the steps.

    Proxy on the left axis, gold on the right one. Dots are steps, lines their running means.
    """
    width = WIDTH / 2 - 2 * MARGIN_X
    panels = (Panel(MARGIN_X, width), Panel(WIDTH / 2 + MARGIN_X, width))
    shapes = [
        *_panel(
            panels[0], points, root_kl, "square root of KL from the SFT policy (nats a completion)"
        ),
        *_panel(panels[1], points, lambda point: point.step, "steps of PPO"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def root_kl(point: Point) -> float:
    return math.sqrt(max(point.kl, 0.0))  # an estimate from samples, of what is near 0 at first


def _panel(
    panel: Panel, points: Sequence[Point], abscissa: Callable[[Point], float], label: str
) -> Iterator[str]:
    x_ticks = _ticks(0.0, max(map(abscissa, points)))
    y_ticks = _ticks(min(p.proxy for p in points), max(p.proxy for p in points))
    low, high = y_ticks[0], y_ticks[-1]
    corners = (panel.at(0, 1), panel.at(0, 0), panel.at(1, 0), panel.at(1, 1))
    yield _line(corners, "#888")
    for seed in sorted({point.seed for point in points}):
        curve = [point for point in points if point.seed == seed]
        xs = [abscissa(p) / x_ticks[-1] for p in curve]
        for ys, colour in (
            ([(p.proxy - low) / (high - low) for p in curve], PROXY_COLOUR),
            ([p.gold for p in curve], GOLD_COLOUR),
        ):
            yield _dots([panel.at(*one) for one in zip(xs, ys, strict=True)], colour)
            means = zip(smooth(xs), smooth(ys), strict=True)
            yield _line([panel.at(*one) for one in means], colour)
    for tick in x_ticks:
        yield _text(panel.at(tick / x_ticks[-1], 0), f"{tick:g}", dy=18)
    for tick in y_ticks:
        yield _text(
            panel.at(0, (tick - low) / (high - low)), f"{tick:g}", dx=-8, dy=4, anchor="end"
        )
    for i in range(0, 11, 2):
        yield _text(panel.at(1, i / 10), f"{i / 10:g}", dx=8, dy=4, anchor="start")
    yield _text(panel.at(0.5, 0), label, dy=40)
    proxy = "proxy: score of the reward model (std)"
    yield _text(panel.at(0, 1), proxy, dx=-40, dy=-18, anchor="start", colour=PROXY_COLOUR)
    gold = "gold: right answers"
    yield _text(panel.at(1, 1), gold, dx=40, dy=-18, anchor="end", colour=GOLD_COLOUR)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers at equal distances, at most nine, from one that is not above ``low`` to one above."""
    least = max(high - low, 1e-9) / 7
    unit = 10.0 ** math.floor(math.log10(least))
    distance = next(m * unit for m in (1, 2, 5, 10) if m * unit >= least)
    first, last = math.floor(low / distance), math.ceil(high / distance)
    return [i * distance for i in range(first, last + 1)]


def _line(corners: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _dots(places: Sequence[tuple[float, float]], colour: str) -> str:
    path = "".join(f"M{x:.1f},{y:.1f}h0" for x, y in places)  # round caps of lines of no length
    stroke = f'stroke="{colour}" stroke-width="3" stroke-linecap="round" opacity="0.3"'
    return f'<path d="{path}" fill="none" {stroke}/>'


def _text(
    at: tuple[float, float],
    text: str,
    *,
    dx: int = 0,
    dy: int = 0,
    anchor: str = "middle",
    colour: str = "#333",
) -> str:
    place = f'x="{at[0] + dx:.1f}" y="{at[1] + dy:.1f}"'
    return f'<text {place} text-anchor="{anchor}" fill="{colour}">{text}</text>'


if __name__ == "__main__":
    main()
