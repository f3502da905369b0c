"""A run that is stopped in the middle of a rollout, and resumed, equals one that never was."""

import signal
from pathlib import Path

import pytest

from hpc_rlhf.fs import read_json
from tests.e2e_compare import assert_same
from tests.e2e_driver import START_TIMEOUT_S, Command
from tests.launch_driver import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

# Completions long enough that a rollout can be stopped in its middle.
OVERRIDES = (
    "run.steps=4",
    "run.deterministic=true",
    "checkpoint.every_steps=100",
    "model.max_sequence_tokens=60",
    "sampling.max_new_tokens=50",
    "sampling.temperature=2.0",
    "learner.micro_batch_tokens=512",
    "warmup.steps=5",
)


def test_stopped_in_mid_rollout_and_resumed(tmp_path: Path) -> None:
    straight = Command(tmp_path, "straight", OVERRIDES)
    done = straight("run")
    assert done.returncode == 0, done.stderr

    stopped = Command(tmp_path, "stopped", OVERRIDES)
    progress = stopped.run_dir.attempt(1).progress
    with stopped.started() as process:
        wait_until(
            lambda: (
                process.poll() is not None
                or (
                    progress.exists()
                    and read_json(progress)["step"] == 3
                    and read_json(progress)["phase"] == "rollout"
                )
            ),
            "the rollout of step 3",
            START_TIMEOUT_S,
        )
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert stopped.steps() == [1, 2]
    assert (stopped.run_dir.checkpoints / "step_2/manifest.json").exists()
    assert (stopped.run_dir.rollouts / "partial.h5").exists()

    resumed = stopped("run")
    assert resumed.returncode == 0, resumed.stderr
    assert stopped.steps() == [1, 2, 3, 4]
    assert not (stopped.run_dir.rollouts / "partial.h5").exists()
    third = stopped.metrics()[2]
    assert third["rollout/kept_tokens"] + third["rollout/dropped_tokens"] > 0

    # fp32 on the CPU, strictly on-policy: bit for bit, or it is another run
    assert_same(stopped, straight)
