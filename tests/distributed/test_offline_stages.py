"""The offline stages as components run them: killed, stopped, resumed, fed with bad numbers."""

import os
import random
import signal
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpc_rlhf.data.tiny import make_tiny_model
from hpc_rlhf.errors import ExitCode
from tests.distributed.offline_stage import StageRun
from tests.sums import write_demonstrations, write_pairs

pytestmark = pytest.mark.distributed

STEPS = 12
LAYOUTS = {
    "sft": "learner.parallel.tensor=2",
    "reward_model": "learner.parallel.pipeline=2",
    "dpo": "learner.parallel.tensor=1",  # two data-parallel ranks
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model, demonstrations and pairs; the cache of tokens is shared by the tests."""
    root = tmp_path_factory.mktemp("offline")
    make_tiny_model(root / "model", family="qwen3", tied=True, init_std=0.1, max_positions=64)
    write_demonstrations(root / "sft.jsonl")
    write_pairs(root / "pairs.jsonl", root / "held_out.jsonl", count=300, held_out_count=200)
    return root


def _stage(data: Path, stage: str, name: str, *overrides: str) -> StageRun:
    is_sft = stage == "sft"
    return StageRun(
        data / "runs",
        name,
        (
            f"experiment={stage}",
            f"model.path={data / 'model'}",
            f"data.train={data / ('sft.jsonl' if is_sft else 'pairs.jsonl')}",
            f"data.eval={data / ('sft.jsonl' if is_sft else 'held_out.jsonl')}",
            f"data.cache={data / 'cache'}",
            LAYOUTS[stage],
            "model.max_sequence_tokens=32",
            "learner.micro_batch_tokens=256",
            "learner.optimizer.lr=1e-3",
            f"run.steps={STEPS}",
            "offline.batch_size=16",
            "offline.eval_every_steps=5",
            "checkpoint.every_steps=3",
            *overrides,
        ),
    )


def _kill_at_random(run: StageRun, rng: random.Random) -> None:
    """SIGKILL all ranks somewhere behind a step, in whatever phase that is."""
    with run.started():
        run.wait_step(rng.randrange(0, STEPS - 1))
        time.sleep(rng.uniform(0, 0.1))
        run.kill()


@pytest.mark.parametrize("stage", list(LAYOUTS))
def test_killed_and_resumed_is_bitwise_the_same(data: Path, stage: str) -> None:
    kill_at_random(data, stage, int(os.environ.get("KILLS", "1")))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", list(LAYOUTS))
def test_many_kills(data: Path, stage: str) -> None:
    kill_at_random(data, stage, int(os.environ.get("KILLS", "30")))


def kill_at_random(data: Path, stage: str, kills: int) -> None:
    """``KILLS`` and ``KILL_SEED`` choose others."""
    rng = random.Random(int(os.environ.get("KILL_SEED", "0")))
    straight = _stage(data, stage, f"{stage}-straight")
    if not straight.directory.complete.exists():
        assert straight() == [0, 0]
    killed = _stage(data, stage, f"{stage}-killed-{kills}")
    for _ in range(kills):
        if not killed.directory.complete.exists():
            _kill_at_random(killed, rng)
    if not killed.directory.complete.exists():
        assert killed() == [0, 0]
    assert [record["step"] for record in killed.metrics()] == list(range(1, STEPS + 1))
    assert killed.compared() == straight.compared()
    assert killed.weights_sha256() == straight.weights_sha256()


def test_stopped_in_an_evaluation_and_resumed(data: Path) -> None:
    """The step is learned and not recorded; the next attempt measures it, and no step is done twice."""
    overrides = ("run.steps=3", "offline.eval_every_steps=3", "offline.eval_examples=1000")
    long = (
        f"data.eval={data / 'many.jsonl'}",
        "checkpoint.every_steps=100",
        "learner.micro_batch_tokens=1024",
    )
    write_pairs(data / "unused.jsonl", data / "many.jsonl", count=300, held_out_count=1000)
    straight = _stage(data, "reward_model", "eval-straight", *overrides, *long)
    assert straight() == [0, 0]
    stopped = _stage(data, "reward_model", "eval-stopped", *overrides, *long)
    with stopped.started():
        stopped.wait_phase(3, "score")
        os.kill(stopped.pids[1], signal.SIGTERM)
        assert stopped.wait() == [ExitCode.INTERRUPTED] * 2
    assert [record["step"] for record in stopped.metrics()] == [1, 2]
    assert (stopped.directory.checkpoints / "step_3/manifest.json").exists()
    assert stopped() == [0, 0]
    assert stopped.compared() == straight.compared()
    assert "eval/pair/accuracy" in stopped.metrics()[2]
    assert stopped.weights_sha256() == straight.weights_sha256()


def test_a_batch_that_is_not_finite_is_skipped_counted_and_named(
    data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A reference whose log-prob of one answer is NaN costs the steps that the pair is in."""
    shared = f"data.cache={data / 'broken'}"
    assert _stage(data, "dpo", "sound", "run.steps=1", shared)() == [0, 0]
    for file in (data / "broken").glob("reference-*.h5"):
        with h5py.File(file, "r+") as opened:
            if len(opened["log_probs"]) == 300:
                opened["log_probs"][7, 1] = np.nan
    two_epochs = ("run.steps=12", "offline.batch_size=50", shared)
    run = _stage(data, "dpo", "skipping", *two_epochs, "offline.max_skipped_steps=2")
    assert run() == [0, 0]
    skipped = [record for record in run.metrics() if record["train/skipped"]]
    assert len(skipped) == 2
    assert all(record["loss"] is None for record in skipped)
    learned = [record for record in run.metrics() if not record["train/skipped"]]
    assert all(np.isfinite(record["grad_norm"]) for record in learned)

    capfd.readouterr()
    run = _stage(data, "dpo", "skipping-too-often", *two_epochs, "offline.max_skipped_steps=1")
    assert run() == [1, 1]
    message = capfd.readouterr().err
    assert "2 steps were skipped, more than offline.max_skipped_steps=1" in message
    assert "samples: pairs.jsonl:8." in message


def test_a_reward_model_learns_the_rule(rule: Path) -> None:
    """Held-out accuracy, on pairs that it has not seen."""
    run = _stage(rule, "reward_model", "rule", *_rule(rule), "run.steps=60")
    assert run() == [0, 0]
    last = run.metrics()[-1]
    assert last["eval/pair/accuracy"] >= 0.95
    assert last["score/p10"] < last["score/p50"] < last["score/p90"]


def test_dpo_raises_the_margin(rule: Path) -> None:
    run = _stage(
        rule, "dpo", "rule-dpo", *_rule(rule), "run.steps=31", "offline.eval_every_steps=10"
    )
    assert run() == [0, 0]
    assert run.metrics()[0]["pair/margin"] == pytest.approx(0.0, abs=1e-4)  # it is the reference
    margins = [r["eval/pair/margin"] for r in run.metrics() if "eval/pair/margin" in r]
    assert 0 < margins[0] < margins[1] < margins[-1]
    last = run.metrics()[-1]
    assert last["eval/pair/accuracy"] > 0.8
    assert last["eval/implicit_reward/chosen"] > 0 > last["eval/implicit_reward/rejected"]


@pytest.fixture(scope="module")
def rule(data: Path) -> Path:
    write_pairs(data / "rule.jsonl", data / "rule_held_out.jsonl", count=1500, held_out_count=300)
    return data


def _rule(data: Path) -> tuple[str, ...]:
    return (
        f"data.train={data / 'rule.jsonl'}",
        f"data.eval={data / 'rule_held_out.jsonl'}",
        "learner.micro_batch_tokens=1024",
        "offline.batch_size=64",
        "offline.eval_every_steps=60",
        "offline.eval_examples=200",
        "checkpoint.every_steps=100",
    )
