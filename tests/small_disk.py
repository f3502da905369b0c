"""A filesystem that is soon full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(disk: Path, mebibytes: int) -> Iterator[Path]:
    """Make directory ``disk``, a filesystem of its own of so many MiB."""
    disk.mkdir()
    options = f"size={mebibytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
