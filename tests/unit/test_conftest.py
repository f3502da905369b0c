"""The safety nets of the test suite itself (tests/conftest.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def run_pytest(directory: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_inner.py").write_text(f"import time\nimport pytest\n{source}")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(REPOSITORY / "pyproject.toml"), str(directory), *options]
    return subprocess.run(
        command, check=False, cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )


SKIPS = {
    "mark": "@pytest.mark.skip\ndef test_a(): pass\ndef test_b(): pass\n",
    "call": "def test_a(): pytest.skip('no')\ndef test_b(): pass\n",
    "module": "pytest.importorskip('no_such_module')\n",
}


@pytest.mark.parametrize("source", SKIPS.values(), ids=SKIPS.keys())
def test_skip_fails_where_it_is_forbidden(tmp_path: Path, source: str) -> None:
    done = run_pytest(tmp_path, source, "--forbid-skips")
    assert done.returncode != 0
    assert "forbids" in done.stdout


def test_skip_is_allowed_otherwise_and_no_test_is_a_failure(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, SKIPS["mark"]).returncode == pytest.ExitCode.OK
    empty = run_pytest(tmp_path, "", "--forbid-skips")
    assert empty.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_time_limit_fails_the_test_and_goes_on(tmp_path: Path) -> None:
    source = (
        "@pytest.fixture\n"
        "def cleaned(tmp_path):\n    yield\n    print('cleaned up')\n"
        "@pytest.mark.timeout(1)\n"
        "def test_a(cleaned): time.sleep(30)\n"
        "def test_b(): pass\n"
    )
    done = run_pytest(tmp_path, source)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "TestTimeout: longer than 1 s" in done.stdout
    assert "cleaned up" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
