"""Measures over-optimisation of a reward model, and draws it into docs/over_optimisation.svg and .csv.

After Gao, Schulman and Hilton, "Scaling Laws for Reward Model Overoptimization" (2210.10760), figure 1: a
policy learns from a proxy, a reward model of few and partly wrong pairs, and is judged by the gold rule
that the pairs were made by. What the proxy says rises throughout; what the rule says rises, peaks and
falls. The abscissa is the square root of the KL divergence from the policy that training began with.

Run from the repository's root: ``python -m tools.over_optimisation``. Runs in ``--root`` that are there are
resumed, or only read if they are complete.
"""

import argparse
import csv
import io
import math
import subprocess
import sys
from collections.abc import Sequence
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
    "assets.pairs=200",
    "assets.wrong_labels=0.3",
    "chain.reward_model.offline.batch_size=40",
    "chain.reward_model.run.steps=100",
    "chain.ppo.run.steps=200",
    "chain.ppo.algorithm.kl.coef=0.001",
    "chain.ppo.checkpoint.every_steps=100",
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

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 60, 40, 50
PROXY_COLOUR, GOLD_COLOUR = "#7a3fa0", "#c98a00"


def draw(points: Sequence[Point]) -> str:
    """The curves of all seeds as SVG: proxy on the left axis, gold on the right one."""
    seeds = sorted({point.seed for point in points})
    curves = [[point for point in points if point.seed == seed] for seed in seeds]
    x_top = math.ceil(max(math.sqrt(max(p.kl, 0.0)) for p in points))
    proxies = [p.proxy for p in points]
    low, high = math.floor(min(proxies)), math.ceil(max(proxies))

    def at(x: float, y: float) -> str:
        """Pixels of a point given in fractions of both axes."""
        across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return f"{LEFT + x * across:.1f},{TOP + (1 - y) * down:.1f}"

    lines = []
    for curve in curves:
        xs = smooth([math.sqrt(max(p.kl, 0.0)) / x_top for p in curve])
        proxy = smooth([(p.proxy - low) / (high - low) for p in curve])
        gold = smooth([p.gold for p in curve])
        for ys, colour in ((proxy, PROXY_COLOUR), (gold, GOLD_COLOUR)):
            path = " ".join(at(x, y) for x, y in zip(xs, ys, strict=True))
            lines.append(f'<polyline points="{path}" stroke="{colour}"/>')
    left = "proxy: score of the reward model (std of the SFT policy's)"
    across = "square root of KL from the SFT policy (nats a completion)"
    text = [
        *(_text(at(i / x_top, 0), f"{i}", dy=18) for i in range(x_top + 1)),
        *(
            _text(at(0, (i - low) / (high - low)), f"{i}", dx=-8, dy=4, anchor="end")
            for i in range(low, high + 1)
        ),
        *(_text(at(1, i / 10), f"{i / 10}", dx=8, dy=4, anchor="start") for i in range(0, 11, 2)),
        _text(at(0.5, 0), across, dy=40),
        _text(at(0, 1), left, dx=-40, dy=-10, anchor="start", colour=PROXY_COLOUR),
        _text(at(1, 1), "gold: right answers", dx=40, dy=-10, anchor="end", colour=GOLD_COLOUR),
    ]
    frame = f'<polyline points="{at(0, 1)} {at(0, 0)} {at(1, 0)} {at(1, 1)}" stroke="#888"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n'
        '<g fill="none" stroke-width="1.5" stroke-linejoin="round">\n'
        + "\n".join([frame, *lines])
        + "\n</g>\n"
        + "\n".join(text)
        + "\n</svg>\n"
    )


def _text(
    at: str, text: str, *, dx: int = 0, dy: int = 0, anchor: str = "middle", colour: str = "#333"
) -> str:
    x, y = map(float, at.split(","))
    return f'<text x="{x + dx:.1f}" y="{y + dy:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


if __name__ == "__main__":
    main()
