"""What a filesystem that takes no more is called, whoever met it."""

import errno
from pathlib import Path

import pytest

from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import DamagedFile, read_json, system_error, write_failure


class SafetensorError(Exception):
    """Rust's errors are no OSErrors."""


def test_the_cause_is_found_below_the_errors_of_libraries() -> None:
    try:
        try:
            raise OSError(errno.EDQUOT, "Disk quota exceeded", "/a/b")
        except OSError as error:
            raise RuntimeError("PytorchStreamWriter failed") from error
    except RuntimeError as error:
        cause = system_error(error)
    assert cause is not None
    assert (cause.errno, cause.filename) == (errno.EDQUOT, "/a/b")
    rust = SafetensorError("I/O error: No space left on device (os error 28)")
    cause = system_error(rust)
    assert cause is not None
    assert cause.errno == errno.ENOSPC
    assert system_error(ValueError("no such thing")) is None


def test_what_to_do_names_the_setting(tmp_path: Path) -> None:
    text = write_failure(OSError(errno.EROFS, "", "/a/b"), tmp_path, setting="data.cache")
    assert text.startswith("cannot write /a/b: Read-only file system (EROFS); ")
    assert "use another data.cache" in text
    text = write_failure(OSError(errno.ENOSPC, ""), tmp_path)
    assert text.startswith(f"cannot write {tmp_path}: No space left on device (ENOSPC); free space")


def test_a_file_without_what_it_must_have(tmp_path: Path) -> None:
    path = tmp_path / "ended.json"
    path.write_text('{"reason": "x"}')
    assert read_json(path, "reason") == {"reason": "x"}
    with pytest.raises(UserError, match="damaged: it has no 'exit_code'"):
        read_json(path, "exit_code", "reason")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DamagedFile, match="not JSON"):
        read_json(path)
