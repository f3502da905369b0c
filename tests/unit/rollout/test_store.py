"""Rollout files give back what was written, bit for bit."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpc_rlhf.rollout.store import read_scored, read_step, write_step
from hpc_rlhf.types import Completion, Prompt, Readings, Rollout, Scores, VersionSpan
from tests.hdf5_holder import held_open


def make_rollouts() -> list[Rollout]:
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(uid="a.jsonl:1", token_ids=np.array([5, 6, 7], np.int32), answer="42"),
        Prompt(
            uid="ü.jsonl:2",
            token_ids=np.array([9], np.int32),
            answer=None,
            fields={"prompt": "größer?", "level": 3, "tags": ["x", None]},
        ),
        Prompt(uid="a.jsonl:3", token_ids=np.array([8, 8], np.int32), answer=""),
    ]
    rollouts = []
    for prompt in prompts:
        for index in range(3):
            length = [4, 0, 700][index]
            spans = [
                (VersionSpan(version=7, start=0, end=1), VersionSpan(version=9, start=1, end=4)),
                (),
                (VersionSpan(version=7, start=0, end=700),),
            ][index]
            completion = Completion(
                token_ids=rng.integers(0, 2**31 - 1, length, dtype=np.int32),
                logprobs=-rng.random(length, dtype=np.float32) * np.float32(1e-7),
                finish_reason=("stop", "abort", "length")[index],
                versions=spans,
                seed=2**63 - 1 - index,
            )
            rollouts.append(
                Rollout(prompt=prompt, sample_index=index, completion=completion, step=12)
            )
    return rollouts


def assert_equal(a: Any, b: Any) -> None:
    """Equal in every field; arrays in dtype, shape and bits."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()
    elif hasattr(a, "__dataclass_fields__"):
        for field in fields(a):
            assert_equal(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


def test_round_trip(tmp_path: Path) -> None:
    rollouts = make_rollouts()
    rewards = np.array([0, 1, np.nan, 0.1, 1e-30, -0.0, np.nan, 3, 4], np.float32)
    scores = Scores(rewards=rewards, excluded={2: "timeout", 6: "returned None"})
    write_step(tmp_path / "step_12.h5", rollouts, scores)
    read, read_scores = read_step(tmp_path / "step_12.h5")
    assert len(read) == len(rollouts)
    for a, b in zip(read, rollouts, strict=True):
        assert_equal(a, b)
    assert_equal(read_scores, scores)


@pytest.mark.parametrize("with_reference", [True, False])
def test_round_trip_of_what_the_learner_adds(tmp_path: Path, with_reference: bool) -> None:
    rollouts = tuple(make_rollouts())
    rng = np.random.default_rng(1)
    old, reference, values = (
        tuple(-rng.random(len(r.completion.token_ids), dtype=np.float32) for r in rollouts)
        for _ in range(3)
    )
    readings = Readings(old=old, reference=reference if with_reference else None, values=values)
    scores = Scores(rewards=np.arange(len(rollouts), dtype=np.float32))
    path = tmp_path / "step_12.h5"
    write_step(path, rollouts, scores, readings)
    read, read_scores, read_readings = read_scored(path)
    for a, b in zip(read, rollouts, strict=True):
        assert_equal(a, b)
    assert_equal(read_scores, scores)
    for a, b in zip(read_readings.old, old, strict=True):
        assert_equal(a, b)
    for a, b in zip(read_readings.values or (), values, strict=True):
        assert_equal(a, b)
    assert (read_readings.reference is None) != with_reference
    for a, b in zip(read_readings.reference or (), reference, strict=with_reference):
        assert_equal(a, b)

    write_step(path, rollouts, scores)
    with pytest.raises(ValueError, match=r"step_12\.h5: its samples were not scored yet"):
        read_scored(path)


def test_samples_of_a_prompt_share_it(tmp_path: Path) -> None:
    write_step(tmp_path / "step.h5", make_rollouts(), None)
    read, scores = read_step(tmp_path / "step.h5")
    assert scores is None
    assert len({id(rollout.prompt) for rollout in read}) == 3


def test_nothing_is_written_as_nothing(tmp_path: Path) -> None:
    write_step(tmp_path / "step.h5", [], None)
    assert read_step(tmp_path / "step.h5") == ((), None)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "step.h5"
    write_step(path, make_rollouts(), None)
    before = path.read_bytes()
    bad = Prompt(uid="b:1", token_ids=np.array([1], np.int32), fields={"when": object()})
    rollout = make_rollouts()[0]
    with pytest.raises(TypeError):
        write_step(
            path, [Rollout(prompt=bad, sample_index=0, completion=rollout.completion, step=1)], None
        )
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["step.h5"]


def test_prompts_that_differ_under_one_uid_are_refused(tmp_path: Path) -> None:
    first, second = make_rollouts()[:2]
    other = Prompt(uid=second.prompt.uid, token_ids=np.array([1], np.int32))
    mixed = Rollout(prompt=other, sample_index=5, completion=second.completion, step=12)
    with pytest.raises(ValueError, match="two prompts with the uid"):
        write_step(tmp_path / "step.h5", [first, mixed], None)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = write_step(tmp_path / "step.h5", make_rollouts(), None)
    with h5py.File(path, "a") as file:
        file.attrs["format"] = 99
    with pytest.raises(ValueError, match="format 99"):
        read_step(path)


def test_scores_must_match(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 scores for 9 rollouts"):
        write_step(tmp_path / "x.h5", make_rollouts(), Scores(rewards=np.zeros(2, np.float32)))


def test_fields_are_readable_json(tmp_path: Path) -> None:
    path = write_step(tmp_path / "step.h5", make_rollouts(), None)
    with h5py.File(path) as file:
        assert json.loads(file["prompts/fields"].asstr()[1])["prompt"] == "größer?"


@pytest.mark.parametrize("mode", ["r", "a"])
def test_locks_of_other_processes_do_not_matter(tmp_path: Path, mode: str) -> None:
    """Another process holds the file open, and locked: it is read and replaced all the same."""
    path = tmp_path / "step_12.h5"
    rollouts = tuple(make_rollouts())
    write_step(path, rollouts[:3], None)
    with held_open(path, mode):
        assert len(read_step(path)[0]) == 3
        write_step(path, rollouts, None)
        assert len(read_step(path)[0]) == 9
    for read, written in zip(read_step(path)[0], rollouts, strict=True):
        assert_equal(read, written)
    assert [p.name for p in tmp_path.iterdir()] == ["step_12.h5"]
