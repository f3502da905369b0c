"""Is all of a run still what was written? Every byte is read again, and nothing is changed.

Needs no torch: it may run on a login node, next to a run that is going on.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from hpc_rlhf import compose
from hpc_rlhf.checkpoint import frozen, manifest
from hpc_rlhf.checkpoint.save_point import SavePoint
from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import DamagedFile, read_json
from hpc_rlhf.observe.metrics import METRICS_FILE
from hpc_rlhf.rollout import store
from hpc_rlhf.run_dir import RunDir

OnBytes = Callable[[int], None]

_WORKERS = 8  # hashlib releases the interpreter lock; a parallel filesystem feeds several readers
_SHOWN = 5  # problems of one file


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was read: a checkpoint, the rollouts of a step, a model."""

    what: str  # its path below the run directory, or the role of a model
    files: int
    size: int  # bytes
    problems: tuple[str, ...]  # why it is not whole, naming the file; () if it is

    @property
    def whole(self) -> bool:
        return not self.problems


def verify_run(run: RunDir, *, on_bytes: OnBytes | None = None) -> Iterator[Finding]:
    """Read all of ``run`` that is meant to be whole, one finding after another.

    The configuration and the records of the attempts as what they are, checkpoints against their
    manifests (sizes and sha256), rollouts as HDF5, metrics as one record a step, frozen models and
    data sets against the sha256 in ``run.json``. Of frozen models the digest cache is renewed.

    Args:
        on_bytes: called with every count of bytes read and hashed, from several threads.
    """
    yield _records(run)
    with ThreadPoolExecutor(_WORKERS) as pool:
        for point in reversed(manifest.save_points(run.checkpoints)):
            yield _checkpoint(run, point, pool, on_bytes)
    if run.rollouts.is_dir():
        for path in sorted(run.rollouts.glob("*.h5"), key=_step_of):
            yield _rollouts(run, path)
    if (run.metrics / METRICS_FILE).exists():
        yield _metrics(run)
    yield from _identity(run, on_bytes)


def total_bytes(run: RunDir) -> int:
    """What :func:`verify_run` will report to ``on_bytes`` if all is whole."""
    sizes = [
        sum(entry.size for entry in listed.files)
        for point in manifest.save_points(run.checkpoints)
        if (listed := manifest.try_manifest(run.checkpoints / point.name)[0]) is not None
    ]
    try:
        models, data = frozen.pinned(run.identity)
    except (OSError, DamagedFile):  # verify_run says so
        models, data = [], {}
    for ref in models:
        sizes += [file.stat().st_size for file in Path(ref.path).glob("*.safetensors")]
    sizes += [Path(path).stat().st_size for path in data if Path(path).is_file()]
    return sum(sizes)


def _records(run: RunDir) -> Finding:
    """The configuration, and what attempts wrote about themselves."""
    paths, problems = [run.config], []
    try:
        compose.load(run.config)
    except UserError as error:
        problems.append(str(error))
    records = sorted(run.attempts.glob("*/*.json"))
    for path in records:
        try:
            read_json(path)
            paths.append(path)
        except FileNotFoundError:  # the attempt goes on
            continue
        except (OSError, DamagedFile) as error:
            problems.append(str(error))
            paths.append(path)
    size = sum(path.stat().st_size for path in paths if path.exists())
    return Finding("configuration and attempts", len(paths), size, tuple(problems))


def _checkpoint(
    run: RunDir, point: SavePoint, pool: ThreadPoolExecutor, on_bytes: OnBytes | None
) -> Finding:
    directory = run.checkpoints / point.name
    what = str(directory.relative_to(run.path))
    listed, reason = manifest.try_manifest(directory)
    if listed is None:
        return Finding(what, 0, 0, (str(reason),))

    def check(entry: manifest.FileEntry) -> str | None:
        return manifest.size_problem(directory, entry) or manifest.digest_problem(
            directory, entry, on_bytes=on_bytes
        )

    problems = tuple(filter(None, pool.map(check, listed.files)))
    if listed.point != point:
        problems = (f"{manifest.MANIFEST}: of {listed.point.name}", *problems)
    if point.mini_batches and not (run.rollouts / f"step_{point.step + 1}.h5").exists():
        missing = f"rollouts/step_{point.step + 1}.h5, which it goes on with, is missing"
        problems = (*problems, missing)
    return Finding(what, len(listed.files), sum(entry.size for entry in listed.files), problems)


def _rollouts(run: RunDir, path: Path) -> Finding:
    problems: tuple[str, ...] = ()
    try:
        if path.stem.startswith("step_"):
            rollouts, _ = store.read_step(path)
            if others := {r.step for r in rollouts} - {_step_of(path)[0]}:
                problems = (f"holds samples of step {min(others)}",)
        else:
            _read_all(path)
    # What a damaged file raises depends on the byte: KeyError for a lost name, ValueError for an
    # offset or for text that is no JSON, RuntimeError from HDF5 itself, ...
    except Exception as error:  # noqa: BLE001
        problems = (f"{type(error).__name__}: {error}",)
    return Finding(str(path.relative_to(run.path)), 1, path.stat().st_size, problems)


def _read_all(path: Path) -> None:
    """Read every dataset of an HDF5 file."""

    def read(_: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            item[()]

    with h5py.File(path, "r", locking=False) as file:
        file.visititems(read)


def _metrics(run: RunDir) -> Finding:
    path = run.metrics / METRICS_FILE
    content = path.read_bytes()
    problems = metric_problems(content)
    shown = problems[:_SHOWN]
    if len(problems) > _SHOWN:
        shown.append(f"and {len(problems) - _SHOWN} more")
    return Finding(str(path.relative_to(run.path)), 1, len(content), tuple(shown))


def metric_problems(content: bytes) -> list[str]:
    """What keeps ``content`` from being one record a step, in order and from step 1 on."""
    problems = []
    expected = 1
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            why = " (cut short; resuming drops it)" if number == len(lines) else ""
            problems.append(f"line {number}: not a record{why}")
            continue
        if step < expected:
            problems.append(f"line {number}: step {step} again")
            continue
        if step > expected:
            missing = f"step {expected}" if step == expected + 1 else f"steps {expected}-{step - 1}"
            problems.append(f"line {number}: no record of {missing}")
        expected = step + 1
    return problems


def _identity(run: RunDir, on_bytes: OnBytes | None) -> Iterator[Finding]:
    try:
        models, data = frozen.pinned(run.identity)
    except (OSError, DamagedFile) as error:
        yield Finding(run.identity.name, 1, 0, (str(error),))
        return
    for ref in models:
        files = list(Path(ref.path).glob("*.safetensors"))
        problems: tuple[str, ...] = ()
        try:
            frozen.verify(ref, recompute=True, on_bytes=on_bytes)
        except (UserError, OSError) as error:
            problems = (str(error),)
        size = sum(file.stat().st_size for file in files)
        yield Finding(f"{ref.role} model {ref.name}", len(files), size, problems)
    for name, expected in data.items():
        path = Path(name)
        try:
            size, found = path.stat().st_size, frozen.file_sha256(path, on_bytes=on_bytes)
            problems = () if found == expected else (f"sha256 {found}, expected {expected}",)
        except OSError as error:
            size, problems = 0, (f"{path}: {error.strerror}",)
        yield Finding(f"data set {path.name}", 1, size, problems)


def _step_of(path: Path) -> tuple[int, str]:
    """Key that sorts ``step_10.h5`` behind ``step_9.h5``, and other names first."""
    number = path.stem.removeprefix("step_")
    return (int(number) if number.isdigit() else -1, path.name)
