"""A process that ends says why, also where there is no room to say it."""

import errno
import os
import time
from pathlib import Path

import pytest

from hpc_rlhf.cluster.world import World
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.fs import read_json
from hpc_rlhf.launch import component
from hpc_rlhf.observe.startup import StartUp
from hpc_rlhf.observe.timeline import Timeline
from hpc_rlhf.run_dir import Attempt


def record(attempt: Attempt, error: Exception) -> str:
    """Record ``error``; returns what came to the console."""
    reading, console = os.pipe()
    world = World("learner", 0, 1, 0, os.uname().nodename, "local-1", 1)
    timeline = Timeline(None, StartUp(time.time()))
    component._record_failure(attempt, "learner", 0, world, timeline, error, console)
    os.close(console)
    with os.fdopen(reading) as file:
        return file.read()


def test_a_full_disk_is_named_in_the_record(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "1").make()
    full = OSError(errno.ENOSPC, "No space left on device", "/scratch/x")
    assert record(attempt, full) == ""
    written = read_json(attempt.failures / "learner-0.json")["error"]
    assert written.startswith("OSError: cannot write /scratch/x: No space left on device (ENOSPC);")
    # whoever has said it in its own words is left as it is
    said = ComponentError("step 3: no checkpoint")
    said.__cause__ = full
    record(attempt, said)
    written = read_json(attempt.failures / "learner-0.json")["error"]
    assert written == "ComponentError: step 3: no checkpoint"


def test_what_cannot_be_recorded_is_told_to_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(component, "publish_json", full)
    told = record(Attempt(tmp_path / "1").make(), ValueError("a bad thing"))
    assert "learner rank 0 on " in told
    assert "ValueError: a bad thing" in told
    assert "(not recorded: [Errno 28] No space left on device" in told
