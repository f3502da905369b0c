from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch_driver import Driver, wait_until


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    run = tmp_path / "run"
    (run / "do").mkdir(parents=True)
    driver = Driver(run)
    yield driver
    driver.do("finish")
    wait_until(lambda: not driver.processes(), f"no process of {run} to be left")
