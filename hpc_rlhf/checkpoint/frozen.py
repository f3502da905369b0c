"""Frozen models by identity: a checkpoint holds the digest of a reference model, not a copy.

The digest of a model is the sha256 of the concatenated hexadecimal sha256 of its ``*.safetensors``
files, sorted by name; the digests of the single files are those that model hubs list.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import publish_json
from hpc_rlhf.types import FrozenRef

logger = logging.getLogger(__name__)

_CHUNK = 16 << 20
_WORKERS = 8  # hashlib releases the interpreter lock; a parallel filesystem feeds several readers


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
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{role} model {directory}: no *.safetensors file there; expected a Hugging Face "
            "model directory with its weights"
        )
    path = cache or default_cache()
    known = {} if recompute else _read_cache(path)
    keys = [_cache_key(file) for file in files]
    missing = [f for f, k in zip(files, keys, strict=True) if k not in known]
    with ThreadPoolExecutor(_WORKERS) as pool:
        hashed = pool.map(lambda file: file_sha256(file, on_bytes=on_bytes), missing)
        fresh = dict(zip(missing, hashed, strict=True))
    digests = [fresh.get(f) or known[k] for f, k in zip(files, keys, strict=True)]
    if fresh:
        # The key of before the read: a file that changed meanwhile will not match it.
        _add_to_cache(path, dict(zip(keys, digests, strict=True)))
    return FrozenRef(
        role=role,
        name=directory.name,
        sha256=hashlib.sha256("".join(digests).encode()).hexdigest(),
        path=str(directory),
    )


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


def _cache_key(file: Path) -> str:
    stat = file.stat()
    return f"{file}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"


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
