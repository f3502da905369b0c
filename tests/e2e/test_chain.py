"""A chain of runs by the command line: in order, stopped and resumed, and what comes of it."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from hpc_rlhf.chain import compose_links
from hpc_rlhf.observe.metrics import read_metrics
from hpc_rlhf.observe.outcome import LAST_STEPS, reward_gain
from hpc_rlhf.run_dir import RunDir
from tests.e2e_driver import START_TIMEOUT_S, Command
from tests.launch_driver import wait_until
from tools.over_optimisation import measure

SEEDS = [int(seed) for seed in os.environ.get("CHAIN_SEEDS", "0 1 2").split()]


def _chain(root: Path, *overrides: str) -> Command:
    return Command(root, "chain", overrides, base=("experiment=quickstart_ppo",))


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_links_run_in_order_and_complete_ones_are_passed_over(tmp_path: Path) -> None:
    """Stopped in the second link; the same command goes on there, to the last link's end."""
    short = ("chain.sft.run.steps=2", "chain.ppo.run.steps=3", "checkpoint.every_steps=1000")
    command = _chain(tmp_path, *short)
    sft, reward, ppo = (
        RunDir(tmp_path / f"chain-{name}") for name in ("sft", "reward_model", "ppo")
    )
    with command.started("chain.reward_model.run.steps=100000") as process:
        wait_until(
            lambda: len(read_metrics(reward)) >= 2 or process.poll() is not None,
            "two steps of the second link",
            2 * START_TIMEOUT_S,
        )
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert sft.complete.exists()
    assert not ppo.path.exists()

    steps = int(read_metrics(reward)[-1]["step"]) + 1
    done = command("run", f"chain.reward_model.run.steps={steps}", timeout_s=360)
    assert done.returncode == 0, done.stderr
    assert [run.attempt_numbers() for run in (sft, reward, ppo)] == [[1], [1, 2], [1]]
    links = [line for line in done.stdout.splitlines() if line.startswith("link ")]
    assert links == ["link 1 of 3: sft", "link 2 of 3: reward_model", "link 3 of 3: ppo"]
    assert f"{sft.path} is complete" in done.stdout
    ending = done.stdout.rpartition("the chain")[2]
    accuracy = read_metrics(reward)[-1]["eval/pair/accuracy"]
    assert "held-out accuracy " in ending
    assert f" -> {accuracy:.3f}" in ending
    assert "standard deviations" in ending
    records = read_metrics(ppo)
    assert len(records) == 3
    # the policy that PPO began with is the SFT run's, against itself as the reference
    assert abs(records[0]["kl_sequence"]) < 1e-4

    again = command("run", f"chain.reward_model.run.steps={steps}", timeout_s=60)
    assert again.returncode == 0, again.stderr
    assert ending in again.stdout


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_maximises_what_the_reward_model_learned(seed: int, tmp_path: Path) -> None:
    """The experiment as it is shipped, and DPO on its pairs: a line of the table of docs/ppo.md."""
    command = _chain(tmp_path, f"run.seed={seed}")
    done = command("run", timeout_s=2000)
    assert done.returncode == 0, done.stderr
    sft, reward, ppo = compose_links(command.arguments())
    dpo = _dpo(tmp_path, sft.result, Path(str(sft.config.assets["directory"])))

    accuracy = read_metrics(reward.run)[-1]["eval/pair/accuracy"]
    margin = read_metrics(dpo)[-1]["eval/pair/margin"]
    gain = reward_gain(read_metrics(ppo.run), ppo.config.critic.warmup_steps)
    assert gain is not None
    assert gain.kl is not None
    right = [point.gold for point in measure(ppo, seed)]
    print(
        f"\n| {seed} | {accuracy:.3f} | 0 -> {margin:.2f} | {gain.before:.2f} -> {gain.after:.2f} "
        f"| {gain.in_std:.2f} standard deviations (of {gain.std:.2f}) | {gain.kl:.2f} "
        f"| {right[0]:.2f} -> {np.mean(right[-LAST_STEPS:]):.2f} |"
    )
    assert accuracy >= 0.95
    assert margin > 0.5  # of a policy that is its own reference: 0
    assert gain.in_std >= 1


def _dpo(root: Path, policy: Path, assets: Path) -> RunDir:
    overrides = (
        f"model.path={policy}",
        "model.max_sequence_tokens=32",
        f"data.train={assets}/pairs.jsonl",
        f"data.eval={assets}/held_out.jsonl",
        "run.steps=50",
        "learner.optimizer.lr=5e-4",
    )
    command = Command(root, "dpo", overrides, base=("experiment=dpo",))
    done = command("run")
    assert done.returncode == 0, done.stderr
    return command.run_dir
