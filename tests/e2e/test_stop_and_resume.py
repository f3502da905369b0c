"""A run that is stopped in the middle of a step, and resumed, equals one that never was."""

import signal
from pathlib import Path

import pytest

from hpc_rlhf.checkpoint import frozen
from hpc_rlhf.fs import read_json
from hpc_rlhf.types import Phase
from tests.e2e_compare import assert_same
from tests.e2e_driver import START_TIMEOUT_S, Command
from tests.launch_driver import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# Completions long enough that a rollout can be stopped in its middle, and eight optimizer steps.
OVERRIDES = (
    "run.steps=4",
    "run.deterministic=true",
    "run.prompts_per_step=8",
    "checkpoint.every_steps=100",
    "model.max_sequence_tokens=60",
    "sampling.max_new_tokens=50",
    "sampling.temperature=2.0",
    "learner.micro_batch_tokens=512",
    "learner.optimizer.lr=1e-4",
    "algorithm.epochs=2",
    "algorithm.mini_batches=4",
    # what the state has to carry shows in every step's record: lr, kl_coef
    "learner.optimizer.schedule=linear",
    "algorithm.kl.target=0.5",
    # a rare thing, so that a step samples in several rounds
    "reward=regex",
    'reward.pattern="^[0-9]"',
    "algorithm.resampling_rounds=2",
    "warmup.steps=5",
)


def stop_in(command: Command, attempt: int, step: int, phase: Phase) -> None:
    """Run the next attempt until it is in ``phase`` of ``step``, and ask it to stop."""
    progress = command.run_dir.attempt(attempt).progress

    def is_there() -> bool:
        at = read_json(progress) if progress.exists() else {"step": 0}
        return at["step"] == step and at["phase"] == phase

    with command.started() as process:
        wait_until(
            lambda: process.poll() is not None or is_there(),
            f"{phase} of step {step}",
            START_TIMEOUT_S,
        )
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output


def test_stopped_in_mid_rollout_and_in_mid_update_and_resumed(tmp_path: Path) -> None:
    straight = Command(tmp_path, "straight", OVERRIDES)
    done = straight("run")
    assert done.returncode == 0, done.stderr

    stopped = Command(tmp_path, "stopped", OVERRIDES)
    checkpoints, rollouts = stopped.run_dir.checkpoints, stopped.run_dir.rollouts
    assert max(record["dynamic/rounds"] for record in straight.metrics()) > 1

    stop_in(stopped, 1, 2, Phase.ROLLOUT)
    assert stopped.steps() == [1]
    assert [path.name for path in checkpoints.iterdir()] == ["step_1"]
    assert stopped.run_dir.partial_rollout.exists()

    stop_in(stopped, 2, 3, Phase.TRAIN)
    assert stopped.steps() == [1, 2]
    saved = {path.name for path in checkpoints.iterdir()}
    (name,) = saved - {"step_1"}
    assert name in {f"step_2+{done}" for done in range(1, 8)}
    assert (rollouts / "step_3.h5").exists()
    assert not stopped.run_dir.partial_rollout.exists()

    _refuses_a_changed_reference(stopped)
    broken = checkpoints / "step_3"
    broken.mkdir()
    resumed = stopped("run")
    assert resumed.returncode == 0, resumed.stderr
    assert f"{broken} is broken and skipped: manifest.json is missing" in resumed.stderr
    assert f"resumes from {checkpoints / name}" in resumed.stderr
    assert broken.exists()
    assert stopped.steps() == [1, 2, 3, 4]
    second, third = stopped.metrics()[1:3]
    assert second["rollout/kept_tokens"] + second["rollout/dropped_tokens"] > 0
    assert (second["attempt"], third["attempt"]) == (2, 4)  # 3 was refused
    # it was not sampled again, and the samplers have the new weights
    assert third.get("time/rollout", 0.0) < straight.metrics()[2]["time/rollout"] / 2
    assert third["sync/replicas"] == 1

    for name in ("lr", "kl_coef"):
        assert len({record[name] for record in stopped.metrics()}) == 4
    # fp32 on the CPU, strictly on-policy: bit for bit, or it is another run
    assert_same(stopped, straight)


def _refuses_a_changed_reference(command: Command) -> None:
    """Flip a byte of it, see it refused with both digests, and put it back."""
    file = command.run_dir.warmup / "model.safetensors"
    began_with = read_json(command.run_dir.identity)["frozen"]["reference"]["sha256"]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ref = frozen.digest_model("reference", file.parent, cache=command.root / "digests.json")
    metrics = command.metrics()
    refused = command("run")
    assert refused.returncode == 2, refused.stderr
    assert f"began with sha256 {began_with}, found {ref.sha256}" in refused.stderr
    assert command.metrics() == metrics
    file.write_bytes(content)
