"""Publishing files on a parallel filesystem: whole or not at all."""

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from hpc_rlhf.errors import UserError


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


class DamagedFile(UserError, ValueError):
    """A file that was published whole and is not any more: a disk, a copy or an editor did that."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path}: damaged: {why}; put it back from a backup, or delete it, and what it says is "
            "forgotten"
        )
        self.path = path
        self.why = why


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """Read a JSON object published by :func:`publish_json`.

    Args:
        keys: that it must have.

    Raises:
        OSError: it cannot be read.
        DamagedFile: it is not what was published.
    """
    content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(
            path, f"not JSON: {error}" if content.strip() else "it is empty"
        ) from None
    if not isinstance(value, dict):
        raise DamagedFile(path, f"expected a JSON object, got {type(value).__name__}")
    missing = [key for key in keys if key not in value]
    if missing:
        raise DamagedFile(path, f"it has no {missing[0]!r}")
    return value


_REMEDIES = {
    errno.EDQUOT: "the quota there is used up (of bytes or of files): delete files or ask for more",
    errno.EFBIG: "it is larger than this process may write: raise the limit (ulimit -f)",
    errno.EROFS: "it is mounted read-only: ask the site, or use another {setting}",
    errno.EACCES: "it belongs to somebody else: use another {setting}",
    errno.EPERM: "it belongs to somebody else: use another {setting}",
    errno.ENOTDIR: "a file is where a directory must be: use another {setting}",
}
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What a filesystem answers that takes no more; no reader gets these."""

_BY_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers say no more than that


def system_error(error: BaseException | None) -> OSError | None:
    """The operating system's error among the causes of ``error``: libraries wrap it in their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        if number := _BY_RUST.search(str(error)):
            return OSError(int(number[1]), os.strerror(int(number[1])))
        error = error.__cause__ or error.__context__
    return None


def write_failure(error: OSError, path: Path, *, setting: str = "run.root") -> str:
    """What a failed write below ``path`` means and what to do.

    Args:
        setting: the field of the configuration that says where it is.
    """
    assert error.errno is not None
    file = error.filename or path
    text = f"cannot write {file}: {os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"
    if error.errno == errno.ENOSPC:
        remedy = f"free space there ({_free(path)})"
    else:
        remedy = _REMEDIES.get(error.errno, "see that it can be written").format(setting=setting)
    return f"{text}; {remedy}, then run the same command again"


def _free(path: Path) -> str:
    """How full the filesystem of ``path`` is; it may lack inodes, not bytes."""
    try:
        there = os.statvfs(next(p for p in (path, *path.parents) if p.exists()))
    except OSError as error:
        return f"how much is free is unknown: {error.strerror}"
    free, total = (blocks * there.f_frsize / 2**20 for blocks in (there.f_bavail, there.f_blocks))
    return f"{free:,.0f} of {total:,.0f} MiB and {there.f_favail:,} inodes are free"


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
