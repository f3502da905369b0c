"""Checkpoints: resuming is exact, other layouts can load them, broken ones are skipped and kept."""

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from hpc_rlhf.checkpoint import manifest, shards
from hpc_rlhf.checkpoint.manager import CheckpointManager
from hpc_rlhf.checkpoint.save_point import SavePoint
from hpc_rlhf.cluster.rendezvous import wait_for
from hpc_rlhf.config import AlgorithmConfig, KlConfig, OptimizerConfig, ParallelConfig, Schedule
from hpc_rlhf.errors import ComponentError, WaitTimeout
from hpc_rlhf.learner.actor_critic import UnfinishedUpdate, UpdateStopped
from hpc_rlhf.learner.algorithms import make_algorithm
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Experience
from tests.distributed.learner_fixtures import (
    bits_of,
    experience,
    make_trainer,
    update,
    whole_tensors,
)
from tests.distributed.ranks import RankError, run_ranks
from tests.small_disk import mounted

pytestmark = pytest.mark.distributed

ADAM = OptimizerConfig(
    lr=1e-3, warmup_steps=2, schedule=Schedule.LINEAR, weight_decay=0.1, eps=1e-5
)
RUN_STATE = {"step": 2, "cursor": {"epoch": 1, "position": 17}, "frozen": ["abc"]}


@pytest.fixture(scope="module")
def batch(tiny_models: dict[str, Path]) -> Experience:
    return experience(tiny_models["llama"])


@pytest.fixture(scope="module")
def directory(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


def _trainer(directory: Path, parallel: ParallelConfig, **options: Any) -> Trainer:
    return make_trainer(directory, parallel, optimizer=ADAM, total_steps=20, **options)


def _learn(trainer: Trainer, batch: Experience, updates: int) -> list[dict[str, float]]:
    algorithm = make_algorithm(
        AlgorithmConfig(kl=KlConfig(coef=0.05), epochs=1, mini_batches=2)  # two steps an update
    )
    return [update(trainer, algorithm, batch) for _ in range(updates)]


def _draws() -> list[Any]:
    """The next numbers of every random stream."""
    with get_cuda_rng_tracker().fork():
        megatron = torch.rand(2).tolist()
    return [
        random.gauss(0, 1),
        random.random(),
        np.random.standard_normal(),
        np.random.random(),
        torch.rand(2).tolist(),
        megatron,
    ]


def _seed_streams() -> None:
    """Streams that differ by rank, each in the middle of a pair of Gaussians."""
    seed = 100 + torch.distributed.get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    random.gauss(0, 1)
    np.random.standard_normal()
    with get_cuda_rng_tracker().fork():
        torch.rand(1)


@pytest.mark.parametrize(
    ("parallel", "dp", "dtype"),
    [
        pytest.param(ParallelConfig(tensor=2), 1, torch.float32, id="tp2"),
        pytest.param(ParallelConfig(pipeline=2), 1, torch.float32, id="pp2"),
        pytest.param(ParallelConfig(), 2, torch.float32, id="dp2"),
        pytest.param(ParallelConfig(), 2, torch.bfloat16, id="dp2-bf16"),
    ],
)
def test_resuming_is_bitwise_exact(
    directory: Path,
    batch: Experience,
    tmp_path: Path,
    parallel: ParallelConfig,
    dp: int,
    dtype: torch.dtype,
) -> None:
    """Two updates, save, two updates; a fresh process that loads makes the same last two."""
    world = parallel.tensor * parallel.pipeline * dp

    def uninterrupted() -> tuple[Any, ...]:
        trainer = _trainer(directory, parallel, dtype=dtype)
        _seed_streams()
        _learn(trainer, batch, 2)
        CheckpointManager(RunDir(tmp_path), keep=2).save(SavePoint(2), trainer, RUN_STATE)
        return _learn(trainer, batch, 2), bits_of(trainer), _draws()

    def resumed() -> tuple[Any, ...]:
        trainer = _trainer(directory, parallel, dtype=dtype)
        manager = CheckpointManager(RunDir(tmp_path), keep=2)
        fresh = _draws()
        assert manager.latest(verify=True) == SavePoint(2)
        assert manager.load(SavePoint(2), trainer, verify=True) == RUN_STATE
        assert trainer.num_steps == 4
        return _learn(trainer, batch, 2), bits_of(trainer), _draws(), fresh

    expected, found = run_ranks(uninterrupted, world), run_ranks(resumed, world)
    for rank in range(world):
        *after, fresh = found[rank]
        assert tuple(after) == expected[rank], f"rank {rank}"
        for stream, value in enumerate(expected[rank][-1]):
            assert fresh[stream] != value, f"stream {stream} need not have been restored"
    assert len({json.dumps(draws) for _, _, draws in expected}) == world, "streams differ by rank"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


@pytest.mark.parametrize("stop_after", [1, 4])
def test_update_that_is_stopped_between_its_steps_is_gone_on_with(
    directory: Path, batch: Experience, tmp_path: Path, stop_after: int
) -> None:
    """Two epochs of three mini-batches, shuffled: bit by bit what it is in one go, statistics too."""
    algorithm = make_algorithm(AlgorithmConfig(kl=KlConfig(coef=0.05), epochs=2, mini_batches=3))
    point = SavePoint(1, stop_after)

    def uninterrupted() -> tuple[Any, ...]:
        trainer = _trainer(directory, ParallelConfig())
        return [update(trainer, algorithm, batch) for _ in range(3)], bits_of(trainer)

    def stopped() -> dict[str, float]:
        trainer = _trainer(directory, ParallelConfig())
        first = update(trainer, algorithm, batch)
        asked = iter(range(1, stop_after + 1))
        with pytest.raises(UpdateStopped) as raised:
            update(trainer, algorithm, batch, stop=lambda: next(asked) == stop_after)
        assert trainer.num_steps == 6 + stop_after
        state = {"update": raised.value.unfinished.to_json()}
        CheckpointManager(RunDir(tmp_path), keep=1).save(point, trainer, state)
        return first

    def resumed() -> tuple[Any, ...]:
        trainer = _trainer(directory, ParallelConfig())
        state = CheckpointManager(RunDir(tmp_path), keep=1).load(point, trainer)
        unfinished = UnfinishedUpdate.from_json(state["update"])
        rest = update(trainer, algorithm, batch, unfinished=unfinished)
        return [rest, update(trainer, algorithm, batch)], bits_of(trainer)

    straight = run_ranks(uninterrupted, 2)
    firsts = run_ranks(stopped, 2)
    for (stats, bits), first, (rest, found) in zip(
        straight, firsts, run_ranks(resumed, 2), strict=True
    ):
        assert [first, *rest] == stats
        assert found == bits


TP2, PP2 = ParallelConfig(tensor=2), ParallelConfig(pipeline=2)


@pytest.mark.parametrize(
    ("name", "before", "ranks", "after"),
    [
        pytest.param("llama", TP2, 2, PP2, id="tp2-to-pp2"),
        pytest.param("llama", TP2, 4, PP2, id="tp2-dp2-to-pp2"),
        pytest.param("qwen2-tied", TP2, 2, PP2, id="tied-tp2-to-pp2"),
        pytest.param("qwen2-tied", PP2, 2, TP2, id="tied-pp2-to-tp2"),
    ],
)
def test_another_layout_goes_on_from_it(
    tiny_models: dict[str, Path],
    tmp_path: Path,
    name: str,
    before: ParallelConfig,
    ranks: int,
    after: ParallelConfig,
) -> None:
    """Weights bit by bit; the further losses are those of the uninterrupted run within 1e-4."""
    directory = tiny_models[name]
    batch = experience(directory)

    def saves() -> tuple[Any, ...]:
        trainer = _trainer(directory, before)
        _learn(trainer, batch, 1)
        CheckpointManager(RunDir(tmp_path), keep=2).save(SavePoint(1), trainer, RUN_STATE)
        return whole_tensors(trainer.model), _learn(trainer, batch, 4)

    def loads() -> tuple[Any, ...]:
        trainer = _trainer(directory, after)
        manager = CheckpointManager(RunDir(tmp_path), keep=2)
        assert manager.load(SavePoint(1), trainer) == RUN_STATE
        return whole_tensors(trainer.model), _learn(trainer, batch, 4)

    saved, loaded = run_ranks(saves, ranks), run_ranks(loads, 2)
    course = saved[0][1]
    assert abs(course[-1]["loss"] - course[0]["loss"]) > 1e-3, "nothing is learned"
    for _, resumed in loaded:
        for now, uninterrupted in zip(resumed, course, strict=True):
            assert now["loss"] == pytest.approx(uninterrupted["loss"], abs=1e-4)
            assert now["grad_norm"] == pytest.approx(uninterrupted["grad_norm"], rel=1e-4)
            assert now["lr"] == uninterrupted["lr"]
    weights = {k: v for tensors, _ in saved for k, v in tensors.items()}
    found = {k: v for tensors, _ in loaded for k, v in tensors.items()}
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.fixture(scope="module")
def saved(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with whole checkpoints of steps 1, 2 and 3, of two ranks."""
    run = tmp_path_factory.mktemp("saved")

    def saves() -> None:
        trainer = _trainer(directory, ParallelConfig(tensor=2))
        manager = CheckpointManager(RunDir(run), keep=0)
        for step in (1, 2, 3):
            manager.save(SavePoint(step), trainer, {"step": step})

    run_ranks(saves, 2)
    return run


def _largest_shard(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)


def _flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _latest(run: Path, *, verify: bool) -> tuple[SavePoint | None, list[str]]:
    """`latest` of two ranks, with what rank 0 says."""

    def look() -> tuple[SavePoint | None, list[str]]:
        said: list[str] = []
        manager = CheckpointManager(RunDir(run), keep=1)
        return manager.latest(verify=verify, tell=said.append), said

    (first, said), (second, silence) = run_ranks(look, 2)
    assert first == second
    assert silence == []
    return first, said


def test_broken_checkpoints_are_skipped_and_said_and_kept(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    checkpoints = run / "checkpoints"
    assert _latest(run, verify=True) == (SavePoint(3), [])

    flipped = _largest_shard(checkpoints / "step_3")
    _flip_byte(flipped)
    assert _latest(run, verify=False) == (SavePoint(3), []), "sizes cannot tell"
    found, (warning,) = _latest(run, verify=True)
    assert found == SavePoint(2)
    assert "step_3 is broken" in warning
    assert f"{flipped.name}: sha256" in warning

    shard = _largest_shard(checkpoints / "step_2")
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 1)
    (checkpoints / "step_3" / manifest.MANIFEST).unlink()
    found, warnings = _latest(run, verify=False)
    assert found == SavePoint(1)
    assert "manifest.json is missing" in warnings[0]
    assert f"{shard.name}: {size - 1} bytes, expected {size}" in warnings[1]

    (checkpoints / "step_1" / manifest.MANIFEST).write_text("{}")
    found, warnings = _latest(run, verify=False)
    assert found is None
    assert "not a manifest" in warnings[2]
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_1", "step_2", "step_3"]


def test_each_file_is_read_by_one_rank(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> list[str]:
        names: list[str] = []
        check = manifest.digest_problem

        def recording(directory: Path, entry: manifest.FileEntry) -> str | None:
            names.append(entry.name)
            return check(directory, entry)

        monkeypatch.setattr(manifest, "digest_problem", recording)
        assert CheckpointManager(RunDir(saved), keep=1).latest(verify=True) == SavePoint(3)
        return names

    first, second = run_ranks(look, 2)
    listed = manifest.read_manifest(saved / "checkpoints/step_3").files
    assert sorted(first + second) == [entry.name for entry in listed]
    assert {"__0_0.distcp", "__1_0.distcp"} <= {*first, *second}
    assert not {"__0_0.distcp", "__1_0.distcp"} <= {*first}, "one rank read both shards"


def test_a_broken_checkpoint_is_not_loaded(saved: Path, directory: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    (run / "checkpoints/step_3/state.h5").unlink()

    def loads() -> str:
        trainer = _trainer(directory, ParallelConfig(tensor=2))
        with pytest.raises(ComponentError) as raised:
            CheckpointManager(RunDir(run), keep=1).load(SavePoint(3), trainer)
        return str(raised.value)

    for message in run_ranks(loads, 2):
        assert "step_3 is not whole: state.h5: No such file" in message


def test_a_checkpoint_of_another_model_is_refused(
    saved: Path, tiny_models: dict[str, Path]
) -> None:
    def loads() -> str:
        trainer = _trainer(tiny_models["qwen3"], ParallelConfig(tensor=2))
        with pytest.raises(ComponentError) as raised:
            CheckpointManager(RunDir(saved), keep=0).load(SavePoint(3), trainer)
        return str(raised.value)

    for message in run_ranks(loads, 2):
        assert "q_layernorm" in message


def test_retention_counts_whole_ones_only(saved: Path, directory: Path, tmp_path: Path) -> None:
    """The newest two whole ones stay; a broken one neither counts nor goes."""
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    checkpoints = run / "checkpoints"
    (checkpoints / "step_2" / manifest.MANIFEST).unlink()
    for name in (".step_4.tmp-1-aa", ".step_4.tmp-2-bb"):  # of attempts 1 and 2
        (checkpoints / name).mkdir()

    def saves() -> None:
        trainer = _trainer(directory, ParallelConfig())
        CheckpointManager(RunDir(run), keep=2, attempt=2).save(SavePoint(4), trainer, {})

    run_ranks(saves, 1)
    names = sorted(p.name for p in checkpoints.iterdir())
    assert names == [".step_4.tmp-2-bb", "step_2", "step_3", "step_4"]


def test_saving_a_step_again_puts_the_old_one_aside(
    saved: Path, directory: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    checkpoints = run / "checkpoints"
    _flip_byte(_largest_shard(checkpoints / "step_3"))

    def saves() -> None:
        trainer = _trainer(directory, ParallelConfig())
        CheckpointManager(RunDir(run), keep=0).save(SavePoint(3), trainer, {})

    run_ranks(saves, 1)
    assert manifest.problem(checkpoints / "step_3", digests=True) is None
    (aside,) = checkpoints.glob(".step_3.replaced-*")
    assert "sha256" in (manifest.problem(aside, digests=True) or "")


@pytest.mark.parametrize(
    ("where", "failing_rank"),
    [("common", 0), ("shards", 0), ("shards", 1), ("fsync", 1), ("state", 0)],
)
def test_a_failed_save_fails_on_every_rank_and_leaves_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, failing_rank: int
) -> None:
    """A full disk met by one rank: no rank waits for it, and no checkpoint seems to be there."""
    target = {
        "common": "hpc_rlhf.checkpoint.shards._write_common",
        "shards": "hpc_rlhf.checkpoint.shards.FileSystemWriter.write_data",
        "fsync": "os.fsync",  # where a full disk may be met first
        "state": "hpc_rlhf.checkpoint.manager.write_state",
    }[where]

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def saves() -> str:
        trainer = _trainer(directory, ParallelConfig(tensor=2))
        manager = CheckpointManager(RunDir(tmp_path), keep=1, timeout_s=30)
        if torch.distributed.get_rank() == failing_rank:
            monkeypatch.setattr(target, full)
        with pytest.raises(ComponentError) as raised:
            manager.save(SavePoint(1), trainer, {})
        return str(raised.value)

    for message in run_ranks(saves, 2, timeout_s=60):
        assert "No space left on device" in message
        assert f"rank {failing_rank}" in message
    assert list((tmp_path / "checkpoints").iterdir()) == []


def _hold_writers(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writers of this rank begin when the event is set."""
    go, write = threading.Event(), shards.write_shards

    def held(*args: Any) -> list[manifest.FileEntry]:
        assert go.wait(60)
        return write(*args)

    monkeypatch.setattr("hpc_rlhf.checkpoint.manager.write_shards", held)
    return go


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_while_it_is_written(
    directory: Path,
    batch: Experience,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    """Two updates, and only then it is written: it holds the state that it was called with."""

    def saves() -> tuple[Any, ...]:
        go = _hold_writers(monkeypatch)
        trainer = _trainer(directory, ParallelConfig(), dtype=dtype)
        _seed_streams()
        _learn(trainer, batch, 1)
        state = {"step": 1, "cursor": {"position": 4}}
        manager = CheckpointManager(RunDir(tmp_path), keep=0)
        before = bits_of(trainer)
        manager.save(SavePoint(1), trainer, state, wait=False)
        state["cursor"]["position"] = 5
        course = _learn(trainer, batch, 2), bits_of(trainer), _draws()
        assert course[1] != before
        with pytest.raises(WaitTimeout, match="step_1 is still being written"):
            manager.wait(0.01)
        assert manifest.save_points(tmp_path / "checkpoints") == []
        go.set()
        manager.wait()
        assert manager.latest(verify=True) == SavePoint(1)
        return course

    def loads() -> tuple[Any, ...]:
        trainer = _trainer(directory, ParallelConfig(), dtype=dtype)
        state = CheckpointManager(RunDir(tmp_path), keep=0).load(SavePoint(1), trainer)
        assert state == {"step": 1, "cursor": {"position": 4}}
        return _learn(trainer, batch, 2), bits_of(trainer), _draws()

    expected, found = run_ranks(saves, 2), run_ranks(loads, 2)
    for rank in range(2):
        assert found[rank] == expected[rank], f"rank {rank}"


def test_one_save_at_a_time_and_buffers_are_used_again(
    directory: Path, batch: Experience, tmp_path: Path
) -> None:
    """Three saves in a row, an update before each: every one holds its own step's weights."""

    def saves() -> list[dict[str, torch.Tensor]]:
        trainer = _trainer(directory, ParallelConfig(tensor=2))
        manager = CheckpointManager(RunDir(tmp_path), keep=0)
        weights = []
        for step in (1, 2, 3):
            _learn(trainer, batch, 1)
            manager.save(SavePoint(step), trainer, {}, wait=False)
            assert manifest.save_points(tmp_path / "checkpoints")[: step - 1] == [
                SavePoint(before) for before in range(step - 1, 0, -1)
            ]
            weights.append(whole_tensors(trainer.model))
        manager.close(60)
        cost = manager.take_cost()
        assert cost is not None
        assert manager.take_cost() is None
        listed = manifest.read_manifest(manager.path(SavePoint(3))).files
        assert cost.bytes == sum(entry.size for entry in listed)
        assert 0 < cost.blocked_seconds < cost.seconds
        return weights

    def loads() -> list[dict[str, torch.Tensor]]:
        trainer = _trainer(directory, ParallelConfig(tensor=2))
        manager = CheckpointManager(RunDir(tmp_path), keep=0)
        assert manager.latest(verify=True) == SavePoint(3)
        weights = []
        for step in (1, 2, 3):
            manager.load(SavePoint(step), trainer, verify=True)
            weights.append(whole_tensors(trainer.model))
        return weights

    expected, found = run_ranks(saves, 2)[0], run_ranks(loads, 2)[0]
    for before, now in zip(expected, found, strict=True):
        assert all(torch.equal(before[name], now[name]) for name in before)


def test_a_failure_in_the_background_is_raised_by_the_next_call_on_every_rank(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def saves() -> str:
        trainer = _trainer(directory, ParallelConfig(tensor=2))
        manager = CheckpointManager(RunDir(tmp_path), keep=0, timeout_s=30)
        manager.save(SavePoint(1), trainer, {}, wait=False)
        manager.wait()
        with monkeypatch.context() as patch:
            if torch.distributed.get_rank() == 1:
                patch.setattr(shards.FileSystemWriter, "write_data", full)
            manager.save(SavePoint(2), trainer, {}, wait=False)
            wait_for(lambda: manager.failed or None, what="the save to fail", timeout_s=30)
            with pytest.raises(ComponentError) as raised:
                manager.save(SavePoint(3), trainer, {}, wait=False)
        assert not manager.failed
        manager.save(SavePoint(4), trainer, {}, wait=False)  # told once
        assert manager.latest() == SavePoint(4)
        return str(raised.value)

    for message in run_ranks(saves, 2, timeout_s=60):
        assert "save step_2: write shards: learner rank 1: cannot write" in message
        assert "ENOSPC" in message
    assert manifest.save_points(tmp_path / "checkpoints") == [SavePoint(4), SavePoint(1)]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
    ("where", "victim"), [("shards", 0), ("shards", 1), ("metadata", 0), ("manifest", 0)]
)
def test_killed_while_it_is_written_the_one_before_is_the_newest(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, victim: int
) -> None:
    target = {
        "shards": "hpc_rlhf.checkpoint.shards._HashingStream.write",
        "metadata": "hpc_rlhf.checkpoint.shards.FileSystemWriter.finish",
        "manifest": "hpc_rlhf.checkpoint.manifest.publish_manifest",
    }[where]
    write = shards._HashingStream.write

    def die(*args: Any, **kwargs: Any) -> int:
        if where == "shards" and args[0].size < 100_000:
            return write(*args)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def saves() -> None:
        trainer = _trainer(directory, ParallelConfig(tensor=2))
        manager = CheckpointManager(RunDir(tmp_path), keep=1, attempt=1, timeout_s=30)
        manager.save(SavePoint(1), trainer, {"step": 1})
        if torch.distributed.get_rank() == victim:
            monkeypatch.setattr(target, die)
        manager.save(SavePoint(2), trainer, {"step": 2}, wait=False)
        manager.wait()

    def resumes() -> SavePoint | None:
        trainer = _trainer(directory, ParallelConfig(tensor=2))
        manager = CheckpointManager(RunDir(tmp_path), keep=1, attempt=2)
        assert manager.latest(verify=True) == SavePoint(1)
        assert manager.load(SavePoint(1), trainer) == {"step": 1}
        manager.save(SavePoint(2), trainer, {"step": 2})
        return manager.latest(verify=True)

    with pytest.raises(RankError):
        run_ranks(saves, 2, timeout_s=60)
    (unfinished,) = (tmp_path / "checkpoints").glob(".step_2.tmp-1-*")
    if where == "shards":
        size = (unfinished / f"__{victim}_0.distcp").stat().st_size
        whole = (tmp_path / f"checkpoints/step_1/__{victim}_0.distcp").stat().st_size
        assert 0 < size < whole, "killed in the middle of the file"
    assert run_ranks(resumes, 2) == [SavePoint(2)] * 2
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem with room for one checkpoint and a part of the next."""
    with mounted(tmp_path / "disk", 8) as disk:
        yield disk


def test_a_full_disk_ends_the_run_with_what_to_do_and_keeps_the_last_checkpoint(
    directory: Path, small_disk: Path
) -> None:
    def saves() -> str:
        trainer = _trainer(directory, ParallelConfig(tensor=2))
        manager = CheckpointManager(RunDir(small_disk), keep=0, timeout_s=30)
        with pytest.raises(ComponentError) as raised:  # noqa: PT012 - how many fit is not known
            for step in range(1, 100):
                manager.save(SavePoint(step), trainer, {})
        assert step > 1, "one fits"
        return str(raised.value)

    messages = run_ranks(saves, 2, timeout_s=60)
    for message in messages:
        assert f"cannot write {small_disk}/" in message
        assert "No space left on device (ENOSPC); free space there (" in message
        assert re.search(r"\([01] of 8 MiB and [\d,]+ inodes are free\)", message)
        assert "then run the same command again" in message
    checkpoints = small_disk / "checkpoints"
    names = sorted(p.name for p in checkpoints.iterdir())
    assert all(name.startswith("step_") for name in names), "no temporary is left"
    newest = manifest.save_points(checkpoints)[0]
    assert len(names) == newest.step
    assert _latest(small_disk, verify=True) == (newest, [])


def test_written_files_are_known_without_reading_them(tmp_path: Path) -> None:
    files = shards._HashingFiles()
    parts = [bytes([i]) * size for i, size in enumerate((3, 1 << 20, 5, (1 << 21) + 1, 7))]
    with files.create_stream(tmp_path / "a.tmp", "wb") as stream:
        for part in parts:
            assert stream.write(part) == len(part)
        assert stream.tell() == sum(map(len, parts))
    files.rename(tmp_path / "a.tmp", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"".join(parts)
    assert files.entries == [manifest.describe(tmp_path / "a")]


def test_a_disk_that_fails_while_a_file_is_written_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells an error of the disk once: the fsync at the end may know nothing of it."""

    def broken(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    files = shards._HashingFiles()

    def write() -> None:
        with files.create_stream(tmp_path / "a", "wb") as stream:
            stream.write(bytes(1 << 20))
            os.fsync(stream.fileno())
            stream.close()

    with pytest.raises(OSError, match="Input/output error"):
        write()
    assert files.entries == []


def test_a_file_size_limit_is_named(directory: Path, tmp_path: Path) -> None:
    def saves() -> str:
        trainer = _trainer(directory, ParallelConfig(tensor=2))
        manager = CheckpointManager(RunDir(tmp_path), keep=0, timeout_s=30)
        if torch.distributed.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(ComponentError) as raised:
            manager.save(SavePoint(1), trainer, {})
        return str(raised.value)

    for message in run_ranks(saves, 2, timeout_s=60):
        assert "rank 1: cannot write" in message
        assert "File too large (EFBIG); it is larger than this process may write" in message
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_larger_world_continues_old_streams_and_seeds_new_ones(
    saved: Path, directory: Path
) -> None:
    """Ranks 0 and 1 were saved; 2 and 3 are seeded, the same way at every load."""

    def loads() -> list[Any]:
        trainer = _trainer(directory, ParallelConfig(tensor=2))
        CheckpointManager(RunDir(saved), keep=0).load(SavePoint(3), trainer)
        return _draws()[:-1]  # Megatron's streams belong to the layout

    once, again = run_ranks(loads, 4), run_ranks(loads, 4)
    assert once == again
    assert once[:2] == run_ranks(loads, 2)
    assert len({json.dumps(draws) for draws in once[1:]}) == 3
