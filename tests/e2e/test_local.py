"""Whole runs on this machine: real learner, real sampler, and what becomes of them when one dies."""

import os
import signal
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_rlhf.fs import read_json
from hpc_rlhf.types import Phase
from tests.e2e_driver import START_TIMEOUT_S, Command
from tests.launch_driver import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


def test_run_completes_and_is_not_run_again(tmp_path: Path) -> None:
    command = Command(tmp_path, overrides=("run.steps=3", "checkpoint.every_steps=2"))
    done = command("run")
    assert done.returncode == 0, done.stderr
    assert command.steps() == [1, 2, 3]
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    assert all("reward" in line and "KL" in line and "tok/s" in line for line in lines)

    started = read_json(command.run_dir.attempt(1).startup)
    assert f"start-up {started['seconds']:.1f} s: launch " in done.stderr
    assert sum(started["parts"].values()) == pytest.approx(started["seconds"], abs=0.1)
    assert {"imports", "groups", "samplers", "sync", "first token"} <= started["parts"].keys()
    assert {"imports", "engine", "server"} <= started["samplers"]["0"].keys()
    assert "set-up: imports " in done.stdout

    first = command.metrics()[0]
    assert first["startup/seconds"] == pytest.approx(started["seconds"], abs=0.01)
    assert "startup/seconds" not in command.metrics()[1]
    assert 0 <= first["reward/mean"] <= 1
    assert abs(first["kl"]) < 1e-6  # the policy is the reference before the first update
    # fp32 on both sides: learner and sampler agree on the tokens that were sampled
    assert max(record["logprob_gap_max"] for record in command.metrics()) < 1e-4
    phases = [f"time/{phase}" for phase in Phase if phase not in (Phase.SETUP, Phase.CHECKPOINT)]
    assert all(record[name] > 0 for record in command.metrics() for name in phases)

    board = EventAccumulator(str(command.run_dir.metrics / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("reward/mean")] == [1, 2, 3]

    assert (command.run_dir.path / "policy/config.json").exists()
    assert oct(command.run_dir.token_file.stat().st_mode)[-3:] == "600"
    token = command.run_dir.token_file.read_text()
    for log in command.run_dir.path.glob("attempts/*/logs/*"):
        assert token not in log.read_text()
    assert command.processes() == []

    again = command("run", timeout_s=60)
    assert again.returncode == 0
    assert command.run_dir.attempt_numbers() == [1]

    changed = command("run", "learner.optimizer.lr=1e-5", timeout_s=60)
    assert changed.returncode == 2
    assert "learner.optimizer.lr: was 0.0005, now 1e-05" in changed.stderr


def test_killed_learner_rank_ends_the_attempt_and_the_next_one_resumes(tmp_path: Path) -> None:
    command = Command(tmp_path, overrides=("run.steps=6", "checkpoint.every_steps=2"))
    with command.started("run.steps=100000") as process:
        command.wait_step(3, process)
        os.kill(command.pids("learner")[1], signal.SIGKILL)
        killed = time.monotonic()
        output, _ = process.communicate(timeout=60)
        assert time.monotonic() - killed < 30
        assert process.returncode == 1
        message = next(line for line in output.splitlines() if "attempt 1 ends" in line)
        assert "learner rank 1 on " in message
        assert os.uname().nodename in message
        assert "SIGKILL" in message
        assert "in phase " in message
    wait_until(lambda: not command.processes(), "no process to be left", 10)

    saved = max(int(path.name[5:]) for path in command.run_dir.checkpoints.glob("step_*"))
    ending = str(saved + 2)
    # the configuration of the run is that of its first attempt, but for the steps to do
    done = command("run", f"run.steps={ending}")
    assert done.returncode == 0, done.stderr
    assert command.steps() == list(range(1, int(ending) + 1))
    attempts = {int(record["step"]): record["attempt"] for record in command.metrics()}
    assert attempts[saved] == 1
    assert attempts[saved + 1] == 2


def test_killed_sampler_is_started_again_and_its_samples_reissued(tmp_path: Path) -> None:
    command = Command(tmp_path, overrides=("run.steps=40", "sampler.max_restarts=2"))
    with command.started() as process:
        command.wait_step(2, process)
        for _ in range(3):
            killed = command.pids("sampler-0")
            endpoint = command.run_dir.attempt(1).endpoints / "sampler-0.json"
            if process.poll() is not None:
                break
            wait_until(endpoint.exists, "the sampler to serve", START_TIMEOUT_S)
            steps = len(command.steps())
            os.kill(killed[0], signal.SIGKILL)
            if command.run_dir.attempt(1).ended.exists():
                break
            wait_until(
                lambda killed=killed: (
                    command.pids("sampler-0") != killed or process.poll() is not None
                ),
                "the sampler to be started again or the attempt to end",
                30,
            )
            if process.poll() is None:
                wait_until(
                    lambda steps=steps: len(command.steps()) > steps + 1,
                    "the run to go on with the new sampler",
                    START_TIMEOUT_S,
                )
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    ended = read_json(command.run_dir.attempt(1).ended)
    assert ended["component"] == "sampler"
    assert "death 3 in a row" in ended["reason"]
    assert ended["reason"] in output
    # nothing was lost or taken twice: every recorded step has its whole batch
    assert {record["rollout/samples"] for record in command.metrics()} == {16 * 8}
    assert sum(record["rollout/deaths"] for record in command.metrics()) >= 1
