"""What makes a checkpoint directory whole: its manifest. Needs no torch, so that any tool can ask.

``manifest.json`` is written last and lists every other file with its size and sha256. A directory
without it is no checkpoint; one with a missing, shortened or changed file is broken.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_rlhf.checkpoint import frozen
from hpc_rlhf.checkpoint.frozen import file_sha256
from hpc_rlhf.checkpoint.save_point import SavePoint
from hpc_rlhf.fs import DamagedFile, publish_json, read_json

MANIFEST = "manifest.json"
_WORKERS = 8


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    point: SavePoint
    world_size: int
    files: tuple[FileEntry, ...]  # by name


def describe(file: Path) -> FileEntry:
    """Entry of ``file``, reading all of it."""
    return FileEntry(name=file.name, size=file.stat().st_size, sha256=file_sha256(file))


def publish_manifest(
    directory: Path, point: SavePoint, world_size: int, files: Iterable[FileEntry]
) -> None:
    """Write the manifest: from here on ``directory`` is whole."""
    entries = sorted((asdict(file) for file in files), key=lambda entry: entry["name"])
    value = {**asdict(point), "world_size": world_size, "files": entries}
    publish_json(directory / MANIFEST, value)


def read_manifest(directory: Path) -> Manifest:
    """Read a manifest.

    Raises:
        OSError: there is none.
        ValueError: it is not a manifest.
    """
    value = read_json(directory / MANIFEST)
    try:
        files = tuple(FileEntry(**entry) for entry in value["files"])
        point = SavePoint(value["step"], value.get("mini_batches", 0))
        return Manifest(point=point, world_size=value["world_size"], files=files)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / MANIFEST}: not a manifest: {error!r}") from error


def problem(directory: Path, *, digests: bool = False) -> str | None:
    """Why ``directory`` is not a whole checkpoint, naming the first such file; None if it is.

    Args:
        digests: read every byte and compare digests; else compare sizes.
    """
    manifest, reason = try_manifest(directory)
    if manifest is None:
        return reason
    for entry in manifest.files:
        if reason := size_problem(directory, entry):
            return reason
    if not digests:
        return None
    with ThreadPoolExecutor(_WORKERS) as pool:
        reasons = pool.map(lambda entry: digest_problem(directory, entry), manifest.files)
        return next(filter(None, reasons), None)


def try_manifest(directory: Path) -> tuple[Manifest | None, str | None]:
    """The manifest of ``directory``, or why there is none to go by."""
    try:
        return read_manifest(directory), None
    except FileNotFoundError:
        return None, f"{MANIFEST} is missing (the save did not end)"
    except DamagedFile as error:
        return None, f"{MANIFEST} is damaged: {error.why}"
    except (OSError, ValueError) as error:
        return None, f"{MANIFEST} cannot be read: {error}"


def size_problem(directory: Path, entry: FileEntry) -> str | None:
    """Why a file is not as listed, from its size; None if it may be."""
    try:
        size = (directory / entry.name).stat().st_size
    except OSError as error:
        return f"{entry.name}: {error.strerror}"
    return None if size == entry.size else f"{entry.name}: {size} bytes, expected {entry.size}"


def digest_problem(
    directory: Path, entry: FileEntry, *, on_bytes: Callable[[int], None] | None = None
) -> str | None:
    """Why a file is not as listed, reading all of it; None if it is. ``on_bytes`` as in
    :func:`~hpc_rlhf.checkpoint.frozen.file_sha256`."""
    try:
        found = file_sha256(directory / entry.name, on_bytes=on_bytes)
    except OSError as error:
        return f"{entry.name}: {error.strerror}"
    return (
        None if found == entry.sha256 else f"{entry.name}: sha256 {found}, expected {entry.sha256}"
    )


def share(files: Sequence[FileEntry], rank: int, ranks: int) -> list[FileEntry]:
    """The files that ``rank`` hashes; see :func:`hpc_rlhf.checkpoint.frozen.share`."""
    by_name = {entry.name: entry for entry in files}
    sizes = {entry.name: entry.size for entry in files}
    return [by_name[name] for name in frozen.share(sizes, rank, ranks)]


def save_points(checkpoints: Path) -> list[SavePoint]:
    """Save points that have a directory in ``checkpoints``, whole or not, newest first."""
    if not checkpoints.is_dir():
        return []
    found = (SavePoint.parse(path.name) for path in checkpoints.iterdir() if path.is_dir())
    return sorted((point for point in found if point is not None), reverse=True)
