from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hpc_rlhf.observe.metrics import MetricsWriter
from hpc_rlhf.observe.outcome import describe, outcome, reward_gain
from hpc_rlhf.run_dir import RunDir


def test_the_gain_in_standard_deviations_of_the_first_policys_rewards() -> None:
    """The two batches that were sampled before the policy changed, against NumPy on all samples."""
    batches = np.random.default_rng(0).normal([[0.0], [0.3], [2.0], [4.0]], 1.5, (4, 50))
    records = [
        {"reward/mean": batch.mean(), "reward/std": batch.std(), "kl_sequence": float(step)}
        for step, batch in enumerate(batches)
    ]
    gain = reward_gain(records, untrained=1)
    assert gain is not None
    assert gain.before == pytest.approx(batches[:2].mean())
    assert gain.std == pytest.approx(batches[:2].std())
    assert gain.after == pytest.approx(batches.mean())  # fewer than five steps
    assert gain.kl == pytest.approx(1.5)
    assert gain.in_std == pytest.approx((batches.mean() - batches[:2].mean()) / batches[:2].std())


def test_steps_without_a_reward_are_left_out() -> None:
    assert reward_gain([{"loss": 1.0}]) is None
    one = {"reward/mean": 1.0, "reward/std": 0.0}
    gain = reward_gain([{"reward/mean": None, "reward/std": None}, one])
    assert gain is not None
    assert (gain.before, gain.after, gain.kl) == (1.0, 1.0, None)
    assert np.isnan(gain.in_std)
    assert "KL" not in str(gain)


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([], None),
        ([{"loss": 3.0}, {"loss": 1.0}], "loss 3.000 -> 1.000"),
        ([{"loss": 3.0, "eval/loss": 2.0}, {"loss": 1.0, "eval/loss": 1.5}], "held-out loss 2.0"),
        ([{"loss": 0.7, "pair/accuracy": 0.5}], "accuracy 0.500 -> 0.500"),
        ([{"pair/accuracy": 0.5, "eval/pair/accuracy": 0.96}], "held-out accuracy 0.960 -> 0.960"),
    ],
)
def test_each_stage_is_judged_by_its_own_number(records: list[dict], text: str | None) -> None:
    found = describe(records)
    assert found is None if text is None else str(found).startswith(text)


def test_a_line_a_link(tmp_path: Path) -> None:
    runs = {name: RunDir(tmp_path / name) for name in ("sft", "reward_model", "ppo")}
    values = (
        {"loss": 1.0},
        {"eval/pair/accuracy": 0.97},
        {"reward/mean": 1.0, "reward/std": 2.0},
    )
    for run, value in zip(runs.values(), values, strict=True):
        run.metrics.mkdir(parents=True)
        writer = MetricsWriter(run)
        writer.write(1, 1, value)
        writer.close()
    console = Console(width=120, record=True)
    console.print(outcome(runs, {"ppo": 0}))
    text = console.export_text()
    assert "held-out accuracy 0.970 -> 0.970" in text
    assert "mean reward 1.000 -> 1.000, +0.00 standard deviations (2.000)" in text
