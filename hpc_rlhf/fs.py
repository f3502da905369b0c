"""Publishing files on a parallel filesystem: whole or not at all."""

import errno
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


def share(path: Path) -> None:
    """Give a file the mode of a new one, by the umask: some libraries write private ones."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


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


_REMEDIES = {
    errno.EDQUOT: "the quota there is used up (of bytes or of files): delete files or ask for more",
    errno.EFBIG: "it is larger than this process may write: raise the limit (ulimit -f)",
    errno.EROFS: "it is mounted read-only: ask the site, or use another run.root",
    errno.EACCES: "it belongs to somebody else: use another run.root",
}


def system_error(error: BaseException | None) -> OSError | None:
    """The operating system's error among the causes of ``error``: torch wraps it in its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        error = error.__cause__ or error.__context__
    return None


def write_failure(error: OSError, path: Path) -> str:
    """What a failed write below ``path`` means and what to do."""
    assert error.errno is not None
    file = error.filename or path
    text = f"cannot write {file}: {os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"
    if error.errno == errno.ENOSPC:
        remedy = f"free space there ({_free(path)})"
    else:
        remedy = _REMEDIES.get(error.errno, "see that it can be written")
    return f"{text}; {remedy}, then run the same command again"


def _free(path: Path) -> str:
    """How full the filesystem of ``path`` is; it may lack inodes, not bytes."""
    try:
        there = os.statvfs(next(p for p in (path, *path.parents) if p.exists()))
    except OSError as error:
        return f"how much is free is unknown: {error.strerror}"
    free = there.f_bavail * there.f_frsize / 2**30
    return f"{free:.2f} GiB of {there.f_blocks * there.f_frsize / 2**30:.2f} GiB and {there.f_favail} inodes are free"


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
