"""Offline stages by the command line: stopped and resumed, and a real model on transcripts."""

import signal
import time
from pathlib import Path

import pytest
import torch

from hpc_rlhf.data.tiny import make_tiny_model
from tests.e2e_driver import Command
from tests.hh import write_pairs
from tools import smollm2_to_hf

pytestmark = pytest.mark.distributed


def _reward_model(root: Path, model: Path, data: Path, *overrides: str) -> Command:
    return Command(
        root,
        "reward",
        (
            "experiment=reward_model",
            f"model.path={model}",
            f"data.train={data}",
            "data.chat_template=true",
            "learner.parallel.pipeline=2",
            *overrides,
        ),
        base=(),
    )


def test_stopped_and_resumed_by_the_command(tmp_path: Path) -> None:
    """Transcripts under the chat template; one component, one line a step, the result named."""
    model = make_tiny_model(tmp_path / "model")
    data = write_pairs(tmp_path / "hh.jsonl.gz", 200)
    command = _reward_model(
        tmp_path / "runs",
        model,
        data,
        "run.steps=100000",
        "learner.optimizer.schedule=constant",
        "offline.batch_size=8",
        "model.max_sequence_tokens=400",
        "data.long_sequences=keep_end",
        "learner.micro_batch_tokens=800",
    )
    with command.started() as process:
        command.wait_step(3, process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    last = command.steps()[-1]
    assert (command.run_dir.checkpoints / f"step_{last}/manifest.json").exists()
    done = command("run", f"run.steps={last + 2}")
    assert done.returncode == 0, done.stderr
    assert command.steps() == list(range(1, last + 3))
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 2
    assert all(" accuracy " in line and " margin " in line for line in lines)
    assert "only differences between answers to one prompt mean something" in done.stdout
    assert str(command.run_dir.path / "reward_model") in done.stdout.replace("\n", "")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_real_model_on_transcripts(tmp_path: Path) -> None:
    """SmolLM2-135M, which has nine heads: two pipeline stages; its padding token ends answers."""
    smollm2_to_hf.convert(smollm2_to_hf.packaged_gguf(), tmp_path / "smollm2", torch.float32)
    data = write_pairs(tmp_path / "hh.jsonl.gz", 2000)
    command = _reward_model(
        tmp_path / "runs", tmp_path / "smollm2", data, "run.steps=20", "offline.batch_size=4"
    )
    refused = command("run", timeout_s=120)
    assert refused.returncode == 2
    assert "'reward_model.pad_token=\"<|endoftext|>\"'" in refused.stderr
    began = time.monotonic()
    done = command("run", 'reward_model.pad_token="<|endoftext|>"', timeout_s=1500)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 900
    assert command.steps() == list(range(1, 21))
    losses = [record["loss"] for record in command.metrics()]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    print("\nseconds a step:", [round(record["time/step"], 1) for record in command.metrics()])
