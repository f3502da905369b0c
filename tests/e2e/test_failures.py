"""What ends a run on this machine, but for deaths: a rank that hangs, a disk that is full."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rlhf.checkpoint import manifest
from hpc_rlhf.cli import main
from hpc_rlhf.data.tiny import make_tiny_model
from hpc_rlhf.fs import read_json
from tests.e2e_driver import Command
from tests.launch_driver import wait_until
from tests.small_disk import mounted
from tests.sums import write_demonstrations

pytestmark = pytest.mark.distributed

PATIENCE_S = 20  # more than two busy cores let one rank start behind the other


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 16 MiB; a checkpoint of the run below has 2."""
    with mounted(tmp_path / "disk", 16) as disk:
        yield disk


def test_a_rank_that_hangs_and_a_full_disk_end_the_attempt_by_name(
    tmp_path: Path, small_disk: Path
) -> None:
    write_demonstrations(tmp_path / "sft.jsonl")
    command = Command(
        small_disk,
        "sft",
        (
            "experiment=sft",
            f"model.path={make_tiny_model(tmp_path / 'model')}",
            f"data.train={tmp_path / 'sft.jsonl'}",
            f"data.cache={tmp_path / 'cache'}",
            "data.eval=null",
            "model.max_sequence_tokens=32",
            "learner.parallel.tensor=2",
            f"learner.collective_timeout_s={PATIENCE_S}",
            "offline.batch_size=8",
            "run.steps=100000",
            "checkpoint.every_steps=10",
        ),
        base=(),
    )
    run = command.run_dir
    with command.started() as process:
        wait_until(lambda: process.poll() is not None or _saved(command), "a checkpoint", 100)
        os.kill(command.pids("learner")[1], signal.SIGSTOP)
        began = time.monotonic()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    # its peers' patience, and what is left to those who do not end by themselves
    assert PATIENCE_S - 1 < time.monotonic() - began < PATIENCE_S + 15
    ended = read_json(run.attempt(1).ended)
    assert (ended["component"], ended["rank"], ended["node"]) == ("learner", 1, os.uname().nodename)
    assert ended["phase"] in ("train", "checkpoint")
    assert ended["reason"].startswith(
        f"learner rank 1 on {os.uname().nodename} hangs in phase {ended['phase']} of step "
    )
    assert ": rank 0 on " in ended["reason"]
    assert ended["reason"] in output
    wait_until(lambda: not command.processes(), "no process to be left", 10)

    before = _saved(command)
    with command.started() as process:
        wait_until(lambda: process.poll() is not None or _saved(command) > before, "another", 100)
        free = os.statvfs(small_disk)
        (small_disk / "ballast").write_bytes(bytes(free.f_bavail * free.f_frsize - 500_000))
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    reason = read_json(run.attempt(2).ended)["reason"]
    # a file of the checkpoint, or what else a step writes
    assert f"cannot write {run.path}/" in reason
    assert "No space left on device (ENOSPC)" in reason
    assert reason in output
    names = sorted(path.name for path in run.checkpoints.iterdir())
    assert _saved(command) > before, "the last checkpoint stands, and nothing else is left"
    assert names == sorted(point.name for point in manifest.save_points(run.checkpoints))
    assert [manifest.problem(run.checkpoints / name) for name in names] == [None] * len(names)
    assert command.processes() == []


@pytest.mark.parametrize("free_kib", [0, 100, 700])
def test_a_disk_too_small_for_the_quickstart(
    free_kib: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its model has 1 MiB: none of it fits, or some."""
    with mounted(tmp_path / "disk", 1) as disk:
        (disk / "ballast").write_bytes(bytes((1024 - free_kib) << 10))
        assert main(["run", "experiment=quickstart", f"run.root={disk}"]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"hpc-rlhf: assets.directory={disk}/.assets/quickstart-0: cannot")
        assert "No space left on device (ENOSPC); free space there (" in message
        assert sorted(path.name for path in disk.rglob("*")) == [".assets", "ballast"]


def _saved(command: Command) -> int:
    """Step of the newest checkpoint, 0 while there is none."""
    points = manifest.save_points(command.run_dir.checkpoints)
    return points[0].step if points else 0
