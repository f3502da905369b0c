"""`hpc-rlhf verify` reads every byte again and says what is whole and what is not, and why."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpc_rlhf import compose
from hpc_rlhf.checkpoint import frozen, manifest
from hpc_rlhf.checkpoint.save_point import SavePoint
from hpc_rlhf.checkpoint.verify import metric_problems, total_bytes, verify_run
from hpc_rlhf.cli import main
from hpc_rlhf.fs import publish_json, read_json
from hpc_rlhf.rollout import store
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.runs import pin_data, pin_models
from hpc_rlhf.types import Completion, Prompt, Rollout, Scores, VersionSpan


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of two steps, as the components write it, with a reference and a data set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = RunDir(tmp_path / "runs/demo")
    model, data = tmp_path / "base", tmp_path / "prompts.jsonl"
    for directory in (run.checkpoints, run.rollouts, run.metrics, model):
        directory.mkdir(parents=True)
    settings = ["experiment=quickstart", f"run.root={run.path.parent}", "run.name=demo"]
    compose.publish(run.config, compose.compose(settings))
    attempt = run.new_attempt()
    publish_json(attempt.started, {"job_id": "1"})
    publish_json(attempt.ended, {"exit_code": 0})
    (model / "model.safetensors").write_bytes(b"weights")
    data.write_text("{}")
    publish_json(run.identity, {"name": "demo"})
    pin_models(run, [frozen.digest_model("reference", model)])
    pin_data(run, {str(data): frozen.file_sha256(data)})
    for step in (1, 2):
        directory = run.checkpoints / f"step_{step}"
        directory.mkdir()
        for name, content in (("__0_0.distcp", b"tensors"), ("state.h5", b"state")):
            (directory / name).write_bytes(content)
        files = [manifest.describe(file) for file in directory.iterdir()]
        manifest.publish_manifest(directory, SavePoint(step), 2, files)
        scores = Scores(rewards=np.ones(1, np.float32), excluded={})
        store.write_step(run.rollouts / f"step_{step}.h5", (_rollout(step),), scores)
        with (run.metrics / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
    return run


def _rollout(step: int) -> Rollout:
    return Rollout(
        prompt=Prompt(uid="p", token_ids=np.arange(4, dtype=np.int32)),
        sample_index=0,
        step=step,
        completion=Completion(
            token_ids=np.arange(64, dtype=np.int32),
            logprobs=np.zeros(64, np.float32),
            finish_reason="stop",
            versions=(VersionSpan(version=0, start=0, end=64),),
            seed=0,
        ),
    )


def _problems(run: RunDir) -> dict[str, tuple[str, ...]]:
    return {f.what: f.problems for f in verify_run(run) if not f.whole}


def test_a_run_as_written_is_whole(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    counted: list[int] = []
    findings = list(verify_run(run, on_bytes=counted.append))
    assert [f.what for f in findings] == [
        "configuration and attempts",
        "checkpoints/step_1",
        "checkpoints/step_2",
        "rollouts/step_1.h5",
        "rollouts/step_2.h5",
        "metrics/metrics.jsonl",
        "reference model base",
        "data set prompts.jsonl",
    ]
    assert all(f.whole for f in findings)
    assert findings[0].files == 3
    assert (findings[1].files, findings[1].size) == (2, 12)
    assert sum(counted) == total_bytes(run) == 2 * 12 + 7 + 2
    assert main(["verify", "demo", "--root", str(run.path.parent)]) == 0
    printed = capsys.readouterr().out
    assert "all 8 are whole" in printed
    assert "rollouts/* (2 steps)" in printed
    assert "rollouts/step_1.h5" not in printed
    assert main(["verify", "--verbose", str(run.path)]) == 0
    assert "rollouts/step_1.h5" in capsys.readouterr().out


def test_checkpoint_in_the_middle_of_a_step_needs_its_samples(run: RunDir) -> None:
    directory = run.checkpoints / "step_1+2"
    (run.checkpoints / "step_1").rename(directory)
    assert _problems(run) == {"checkpoints/step_1+2": ("manifest.json: of step_1",)}
    files = [manifest.describe(directory / name) for name in ("__0_0.distcp", "state.h5")]
    manifest.publish_manifest(directory, SavePoint(1, 2), 2, files)
    assert _problems(run) == {}
    (run.rollouts / "step_2.h5").unlink()
    (problem,) = _problems(run)["checkpoints/step_1+2"]
    assert problem == "rollouts/step_2.h5, which it goes on with, is missing"


def test_every_kind_of_damage_is_named(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.checkpoints / "step_1/__0_0.distcp").write_bytes(b"tensorS")  # one bit, the same size
    (run.checkpoints / "step_1/state.h5").unlink()
    (run.checkpoints / "step_2" / manifest.MANIFEST).unlink()
    rollouts = run.rollouts / "step_1.h5"
    rollouts.write_bytes(rollouts.read_bytes()[:-200])
    (run.rollouts / "step_2.h5").rename(run.rollouts / "step_3.h5")
    (run.metrics / "metrics.jsonl").write_text('{"step": 1}\n{"step": 1}\n')
    (tmp_path / "base/model.safetensors").write_bytes(b"Weights")
    (tmp_path / "prompts.jsonl").unlink()
    run.config.write_text("run: [")
    run.attempt(1).ended.write_text("")

    broken = _problems(run)
    flipped, missing = broken.pop("checkpoints/step_1")
    assert flipped.startswith("__0_0.distcp: sha256")
    assert missing == "state.h5: No such file or directory"
    assert "manifest.json is missing" in broken.pop("checkpoints/step_2")[0]
    assert "truncated file" in broken.pop("rollouts/step_1.h5")[0]
    assert broken.pop("rollouts/step_3.h5") == ("holds samples of step 2",)
    assert broken.pop("metrics/metrics.jsonl") == ("line 2: step 1 again",)
    reference = broken.pop("reference model base")[0]
    assert read_json(run.identity)["frozen"]["reference"]["sha256"] in reference
    assert "No such file" in broken.pop("data set prompts.jsonl")[0]
    config, ended = broken.pop("configuration and attempts")
    assert config.startswith(f"{run.config}: no configuration of a run that can be read")
    assert ended.startswith(f"{run.attempt(1).ended}: damaged: it is empty")
    assert broken == {}

    before = sorted(p.name for p in run.path.rglob("*"))
    assert main(["verify", str(run.path)]) == 1
    printed = capsys.readouterr().out
    assert f"checkpoints/step_1: {flipped}\n" in printed, "not wrapped"
    assert "8 of 8 are not whole" in printed
    assert sorted(p.name for p in run.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ('{"step": 1}\n{"step": 2}\n', []),
        ("", []),
        ('{"step": 1}\n{"step": 3}\n', ["line 2: no record of step 2"]),
        ('{"step": 4}\n', ["line 1: no record of steps 1-3"]),
        ('{"step": 1}\n{"step": 2}\n{"step": 1}\n', ["line 3: step 1 again"]),
        ('{"st\n{"step": 1}\n', ["line 1: not a record"]),
        ('{"step": 1}\n{"st', ["line 2: not a record (cut short; resuming drops it)"]),
        ('{"step": 1}\n[]\n{"step": 2}\n', ["line 2: not a record"]),
    ],
)
def test_metrics_are_one_record_a_step(text: str, problems: list[str]) -> None:
    assert metric_problems(text.encode()) == problems


def test_a_run_that_is_none_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "nothing", "--root", str(tmp_path)]) == 2
    assert "no run 'nothing'" in capsys.readouterr().err


def test_it_needs_no_torch(run: RunDir) -> None:
    code = (
        "import sys; from hpc_rlhf.cli import main\n"
        f"assert main(['verify', {str(run.path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
