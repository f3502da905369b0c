"""Frozen models by identity: a checkpoint holds the digest of a reference model, not a copy.

The digest of a model is the sha256 of the concatenated hexadecimal sha256 of its ``*.safetensors``
files, sorted by name; the digests of the single files are those that model hubs list.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rlhf.errors import ComponentError, UserError
from hpc_rlhf.fs import DamagedFile, publish_json, read_json
from hpc_rlhf.types import FrozenRef

if TYPE_CHECKING:  # it imports torch, which `hpc-rlhf verify` does without
    from hpc_rlhf.cluster.control import ControlGroup

logger = logging.getLogger(__name__)

_CHUNK = 16 << 20
_WORKERS = 8  # hashlib releases the interpreter lock; a parallel filesystem feeds several readers


def pinned(identity: Path) -> tuple[list[FrozenRef], dict[str, str]]:
    """Frozen models, and the sha256 of data sets by path, as a run's ``run.json`` has them.

    Nothing where there is no such file.

    Raises:
        DamagedFile: the file is not what was published.
    """
    if not identity.exists():
        return [], {}
    value = read_json(identity)
    try:
        models = [FrozenRef(**ref) for ref in value.get("frozen", {}).values()]
        return models, dict(value.get("data", {}))
    except (TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(identity, f"not models and data sets by sha256: {error}") from None


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/hpc-rlhf/digests.json``: model directories are often read-only."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hpc-rlhf" / "digests.json"


def digest_model(
    role: str,
    directory: Path,
    *,
    cache: Path | None = None,
    recompute: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> FrozenRef:
    """Identity of the model in ``directory``, hashing its safetensors files in parallel.

    Args:
        role: "reference", "reward", ...
        cache: file of known digests, by path, size, mtime and inode (default:
            :func:`default_cache`). A file that changed in any of these is hashed again.
        recompute: read every byte, whatever the cache says, and renew it.
        on_bytes: called with the size of each chunk read, from several threads.

    Raises:
        UserError: there is no safetensors file in ``directory``.
    """
    directory = directory.resolve()
    path = cache or default_cache()
    files = _look(role, directory, {} if recompute else _read_cache(path))
    fresh = _hash([file.path for file in files if file.sha256 is None], on_bytes)
    return _identify(role, directory, files, fresh, path)


def digest_model_together(
    role: str, directory: Path, control: "ControlGroup", *, cache: Path | None = None
) -> FrozenRef:
    """As :func:`digest_model`, by all ranks of the learner: each file is read by one of them.

    Collective. Only the coordinator looks at the directory and at the cache.

    Raises:
        UserError: there is no safetensors file in ``directory``; on every rank.
        ComponentError: a rank cannot read a file; on every rank.
    """
    directory = directory.resolve()
    path = cache or default_cache()
    files = control.from_coordinator(lambda: _look(role, directory, _read_cache(path)))
    unknown = {str(file.path): file.size for file in files if file.sha256 is None}
    mine = [Path(name) for name in share(unknown, control.rank, control.size)]
    read: dict[Path, str] | str
    try:
        read = _hash(mine, None)
    except OSError as error:
        read = f"learner rank {control.rank}: {role} model {error.filename}: {error.strerror}"
    fresh: dict[Path, str] = {}
    for found in control.gather(read):
        if isinstance(found, str):
            raise ComponentError(found)
        fresh |= found
    return _identify(role, directory, files, fresh, path if control.is_coordinator else None)


def share(sizes: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """The files that ``rank`` reads, so that every rank reads about as much.

    Each file is one rank's, the largest first, to the rank with the least so far.

    Args:
        sizes: name -> bytes.
    """
    loads = [0] * ranks
    mine = []
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        least = loads.index(min(loads))
        loads[least] += size
        if least == rank:
            mine.append(name)
    return mine


def verify(
    ref: FrozenRef,
    *,
    cache: Path | None = None,
    recompute: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Refuse to go on with another model than the one recorded.

    Raises:
        UserError: the model is missing or changed; the message has both digests.
    """
    directory = Path(ref.path)
    if not directory.is_dir():
        raise UserError(
            f"{ref.role} model {ref.name}: directory {directory} is missing; expected the model "
            f"with sha256 {ref.sha256}: put it back"
        )
    found = digest_model(
        ref.role, directory, cache=cache, recompute=recompute, on_bytes=on_bytes
    ).sha256
    if found != ref.sha256:
        raise UserError(
            f"{ref.role} model {ref.name} in {directory} changed since the run began: "
            f"expected sha256 {ref.sha256}, found {found}. Put the original back or start a new run"
        )


def file_sha256(path: Path, *, on_bytes: Callable[[int], None] | None = None) -> str:
    """Hexadecimal sha256 of a file, read in large chunks.

    Args:
        on_bytes: called with the size of each chunk, from the thread that reads.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a model as it was before it was read."""

    path: Path
    size: int  # bytes
    key: str  # in the cache
    sha256: str | None  # if the cache has it


def _look(role: str, directory: Path, cached: Mapping[str, str]) -> list[_File]:
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise UserError(
            f"{role} model {directory}: no *.safetensors file there; expected a Hugging Face "
            "model directory with its weights"
        )
    files = []
    for path in paths:
        stat = path.stat()
        key = f"{path}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
        files.append(_File(path, stat.st_size, key, cached.get(key)))
    return files


def _hash(paths: Sequence[Path], on_bytes: Callable[[int], None] | None) -> dict[Path, str]:
    with ThreadPoolExecutor(_WORKERS) as pool:
        hashed = pool.map(lambda path: file_sha256(path, on_bytes=on_bytes), paths)
        return dict(zip(paths, hashed, strict=True))


def _identify(
    role: str,
    directory: Path,
    files: Sequence[_File],
    fresh: Mapping[Path, str],
    cache: Path | None,
) -> FrozenRef:
    """Identity of the model from its files' digests; the ``fresh`` ones are put into ``cache``."""
    digests = [file.sha256 or fresh[file.path] for file in files]
    if fresh and cache is not None:
        # The key of before the read: a file that changed meanwhile will not match it.
        keys = {file.path: file.key for file in files}
        _add_to_cache(cache, {keys[path]: digest for path, digest in fresh.items()})
    return FrozenRef(
        role=role,
        name=directory.name,
        sha256=hashlib.sha256("".join(digests).encode()).hexdigest(),
        path=str(directory),
    )


def _read_cache(path: Path) -> dict[str, str]:
    try:
        cached: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("digest cache %s ignored: %s", path, error)
        return {}
    return cached if isinstance(cached, dict) else {}


def _add_to_cache(path: Path, digests: dict[str, str]) -> None:
    """Publish the cache with ``digests`` added; two writers at once cost a rehash, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_json(path, _read_cache(path) | digests)
    except OSError as error:
        logger.warning("digest cache %s not written (models will be hashed again): %s", path, error)
