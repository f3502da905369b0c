"""Opening a run again: what may differ, and that everything else is named."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rlhf import compose
from hpc_rlhf.config import Config
from hpc_rlhf.errors import UserError
from hpc_rlhf.runs import check_resume, open_run, pin_data, pin_models
from hpc_rlhf.types import FrozenRef


def config(root: Path, *overrides: str) -> Config:
    return compose.compose(["experiment=quickstart", f"run.root={root}", "run.name=a", *overrides])


@pytest.mark.parametrize(
    "override",
    [
        "learner.parallel.pipeline=2",
        "cluster.learner.tasks_per_node=4",
        "sampler.max_concurrency=3",
        "checkpoint.asynchronous=false",
        "sync.bucket_bytes=1048576",
        "run.max_attempts_without_progress=9",
        "learner.micro_batch_tokens=1024",
        "learner.recompute=full",
        "reward.timeout_s=30",
    ],
)
def test_how_a_run_is_run_may_change(tmp_path: Path, override: str) -> None:
    open_run(config(tmp_path))
    check_resume(config(tmp_path, override))


def test_a_start_that_was_cut_short_is_begun_again(tmp_path: Path) -> None:
    run = open_run(config(tmp_path))
    run.config.unlink()
    check_resume(config(tmp_path))
    # but what a run has made is not taken for nothing
    run.attempt(1).path.mkdir()
    with pytest.raises(UserError, match="is not a run"):
        check_resume(config(tmp_path))


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match=f"run.root={file}: cannot write {file}/a: Not a dir"):
        open_run(config(file))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is empty"),
        ('{"name": "a", "fro', "not JSON: "),
        ("[1]", "expected a JSON object, got list"),
        ('{"frozen": {"reference": {"path": 1}}}', "not models and data sets by sha256: "),
        ('{"frozen": []}', "not models and data sets by sha256: "),
        ("[" * 100_000, "not JSON: "),
    ],
)
def test_a_damaged_identity_is_named(tmp_path: Path, content: str, why: str) -> None:
    run = open_run(config(tmp_path))
    run.identity.write_text(content)
    with pytest.raises(UserError) as raised:
        check_resume(config(tmp_path))
    assert str(raised.value).startswith(f"{run.identity}: damaged: {why}")
    assert "put it back from a backup, or delete it" in str(raised.value)
    run.identity.unlink()
    open_run(config(tmp_path))


def test_what_it_learns_may_not_and_each_difference_is_named(tmp_path: Path) -> None:
    run = open_run(config(tmp_path, "run.seed=3"))
    before = run.config.read_text()
    with pytest.raises(UserError) as raised:
        open_run(config(tmp_path, "run.seed=4", "algorithm.mini_batches=2"))
    assert "run.seed: was 3, now 4" in str(raised.value)
    assert "algorithm.mini_batches: was 1, now 2" in str(raised.value)
    assert run.config.read_text() == before


def test_why_the_steps_may_not_change(tmp_path: Path) -> None:
    cosine = "learner.optimizer.schedule=cosine"
    open_run(config(tmp_path, cosine))
    with pytest.raises(UserError) as raised:
        check_resume(config(tmp_path, cosine, "run.steps=41"))
    assert "run.steps: was 40, now 41" in str(raised.value)
    assert "with learner.optimizer.schedule=cosine the learning rate of every step" in str(
        raised.value
    )


def test_a_frozen_model_that_is_gone_or_another_is_refused(tmp_path: Path) -> None:
    run = open_run(config(tmp_path))
    model = tmp_path / "base"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    began_with = FrozenRef(role="reference", name="base", sha256="aa", path=str(model))
    pin_models(run, [began_with])
    pin_models(run, [began_with])
    pin_data(run, {"/prompts": "cc"})
    check_resume(config(tmp_path))

    with pytest.raises(UserError, match=rf"model {model}: the run began with sha256 aa, found bb"):
        pin_models(run, [replace(began_with, sha256="bb")])
    with pytest.raises(UserError, match="/prompts: the run began with sha256 cc, found dd"):
        pin_data(run, {"/prompts": "dd"})

    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match=rf"model {model} is missing; .* sha256 aa: put it back"):
        check_resume(config(tmp_path))
