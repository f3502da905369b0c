"""Whether two runs did the same, bit for bit."""

import hashlib
from typing import Any

from hpc_rlhf.rollout.store import read_step
from tests.e2e_driver import Command

# What depends on the clock, or counts what was done again.
NOT_COMPARED = (
    *("time", "attempt", "startup/", "trainer/", "sync/", "rollout/", "checkpoint/"),
    "memory/",
)


def compared_metrics(command: Command) -> list[dict[str, Any]]:
    """The records of all steps, less what may differ between two runs of the same."""
    return [
        {name: value for name, value in record.items() if not name.startswith(NOT_COMPARED)}
        for record in command.metrics()
    ]


def sampled_tokens(command: Command) -> list[tuple[str, int, list[int]]]:
    """Every sample of every step, in order: prompt, sample index, token ids."""
    return [
        (rollout.prompt.uid, rollout.sample_index, rollout.completion.token_ids.tolist())
        for step in command.steps()
        for rollout in read_step(command.run_dir.rollouts / f"step_{step}.h5")[0]
    ]


def policy_sha256(command: Command) -> str:
    weights = command.run_dir.path / "policy/model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def assert_same(command: Command, reference: Command) -> None:
    assert command.steps() == reference.steps()
    assert sampled_tokens(command) == sampled_tokens(reference)
    assert compared_metrics(command) == compared_metrics(reference)
    assert policy_sha256(command) == policy_sha256(reference)
