import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch_driver import Driver, wait_until


@pytest.fixture
def driver(tmp_path: Path, slurm_cluster: object) -> Iterator[Driver]:
    run = tmp_path / "run"
    (run / "do").mkdir(parents=True)
    driver = Driver(run)
    yield driver
    subprocess.run(["scancel", "--me", "--name=launch-test"], check=True)
    wait_until(lambda: not driver.processes(), f"no process of {run} to be left")
