import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SlurmSandbox
from tests.launch_driver import Driver, wait_until


@pytest.fixture(autouse=True)
def free_cluster(slurm_cluster: SlurmSandbox) -> None:
    """What a failed test left on the nodes, or a node that it left dead, fails no other test."""
    if not slurm_cluster.is_free(timeout_s=15):
        slurm_cluster.restore()


@pytest.fixture
def driver(tmp_path: Path, slurm_cluster: object) -> Iterator[Driver]:
    run = tmp_path / "run"
    (run / "do").mkdir(parents=True)
    driver = Driver(run)
    yield driver
    subprocess.run(["scancel", "--me", "--name=launch-test"], check=True)
    wait_until(lambda: not driver.processes(), f"no process of {run} to be left")
