"""Notices are repeated once, in order, and whole."""

import logging
from pathlib import Path

import pytest

from hpc_rlhf.observe.notices import Notices, tell
from hpc_rlhf.run_dir import Attempt


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path / "1").make()


def test_each_is_returned_once_and_half_a_line_not_yet(attempt: Attempt) -> None:
    notices = Notices(attempt)
    assert notices.new() == []
    tell(attempt, "resumes from step_7")
    tell(attempt, "two\nlines")
    assert notices.poll() == ["resumes from step_7", "two lines"]
    with attempt.notices.open("a") as file:
        file.write("whole\nha")
        file.flush()
        assert notices.poll() == [], "asked again too soon"
        assert notices.new() == ["whole"]
        file.write("lf\n")
    assert notices.new() == ["half"]
    assert notices.new() == []


def test_what_cannot_be_written_is_logged_and_ends_nothing(
    attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    attempt.notices.mkdir()
    with caplog.at_level(logging.INFO):
        tell(attempt, "resumes from step_7")
    assert "resumes from step_7" in caplog.text
    assert "Is a directory" in caplog.text
