"""Another process that has an HDF5 file open, and locked."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest


@contextlib.contextmanager
def held_open(path: Path, mode: str) -> Iterator[None]:
    """The body runs while the file is locked; the holder must find its own whole until the end."""
    hold = (
        f"import h5py, sys; f = h5py.File({str(path)!r}, {mode!r}); print(len(f)); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline(), "it is open"
        with pytest.raises(BlockingIOError):  # the lock is there
            h5py.File(path, "a")
        yield
        holder.stdin.close()
        assert holder.wait(10) == 0, "the old file is whole for who has it open"
