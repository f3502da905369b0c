"""What makes a checkpoint directory whole: its manifest. Needs no torch, so that any tool can ask.

``manifest.json`` is written last and lists every other file with its size and sha256. A directory
without it is no checkpoint; one with a missing, shortened or changed file is broken.
"""

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_rlhf.checkpoint.frozen import file_sha256
from hpc_rlhf.fs import publish_json, read_json

MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d+)")
_WORKERS = 8


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    world_size: int
    files: tuple[FileEntry, ...]  # by name


def describe(file: Path) -> FileEntry:
    """Entry of ``file``, reading all of it."""
    return FileEntry(name=file.name, size=file.stat().st_size, sha256=file_sha256(file))


def publish_manifest(
    directory: Path, step: int, world_size: int, files: Iterable[FileEntry]
) -> None:
    """Write the manifest: from here on ``directory`` is whole."""
    entries = sorted((asdict(file) for file in files), key=lambda entry: entry["name"])
    value = {"step": step, "world_size": world_size, "files": entries}
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
        return Manifest(step=value["step"], world_size=value["world_size"], files=files)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / MANIFEST}: not a manifest: {error!r}") from error


def problem(directory: Path, *, digests: bool = False) -> str | None:
    """Why ``directory`` is not a whole checkpoint, naming the file; None if it is.

    Args:
        digests: read every byte and compare digests; else compare sizes.
    """
    try:
        manifest = read_manifest(directory)
    except FileNotFoundError:
        return f"{MANIFEST} is missing (the save did not end)"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for entry in manifest.files:
        try:
            size = (directory / entry.name).stat().st_size
        except OSError as error:
            return f"{entry.name}: {error.strerror}"
        if size != entry.size:
            return f"{entry.name}: {size} bytes, expected {entry.size}"
    if not digests:
        return None
    with ThreadPoolExecutor(_WORKERS) as pool:
        found = pool.map(lambda entry: file_sha256(directory / entry.name), manifest.files)
        for entry, sha256 in zip(manifest.files, found, strict=True):
            if sha256 != entry.sha256:
                return f"{entry.name}: sha256 {sha256}, expected {entry.sha256}"
    return None


def steps(checkpoints: Path) -> list[int]:
    """Steps that have a directory in ``checkpoints``, whole or not, newest first."""
    if not checkpoints.is_dir():
        return []
    found = (_STEP.fullmatch(path.name) for path in checkpoints.iterdir() if path.is_dir())
    return sorted((int(match[1]) for match in found if match), reverse=True)
