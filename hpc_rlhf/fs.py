"""Publishing files on a parallel filesystem: whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def fsync_directory(path: Path) -> None:
    """Make the entries of directory ``path`` durable (a rename is only as durable as its directory)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(path: Path, write: Callable[[BinaryIO], Any], *, mode: int = 0o644) -> Path:
    """Write ``path`` through a temporary neighbour: write, fsync, rename, fsync the directory.

    A reader sees the old file or the new one, never a part. The temporary name holds the process
    id and the host, since two nodes may publish the same path.

    Raises:
        OSError: the file could not be written; the old ``path`` is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)
    return path


def publish_text(path: Path, text: str, *, mode: int = 0o644) -> Path:
    """Publish ``text`` as UTF-8; see :func:`publish`."""
    return publish(path, lambda file: file.write(text.encode()), mode=mode)


def publish_json(path: Path, value: Any, *, mode: int = 0o644) -> Path:
    """Publish ``value`` as indented JSON; see :func:`publish`."""
    return publish_text(path, json.dumps(value, indent=1) + "\n", mode=mode)


def read_json(path: Path) -> Any:
    """Read a JSON file published by :func:`publish_json`."""
    return json.loads(path.read_text())


def publish_directory(directory: Path, write: Callable[[Path], None]) -> Path:
    """Make ``directory`` whole or not at all: ``write`` fills a temporary neighbour, then it is renamed.

    Raises:
        FileExistsError: ``directory`` exists (an empty one is replaced).
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        temporary.chmod(0o755)  # mkdtemp makes it private
        write(temporary)
        try:
            temporary.rename(directory)
        except OSError as error:  # ENOTEMPTY or EEXIST, or ENOTDIR for a file, by filesystem
            if directory.exists():
                raise FileExistsError(f"{directory} exists") from error
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    fsync_directory(directory.parent)
    return directory
