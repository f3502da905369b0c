"""Metrics of a run: one record a step in JSONL, which is the truth; TensorBoard is derived from it."""

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_rlhf.fs import publish_text
from hpc_rlhf.run_dir import RunDir

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
_BOOKKEEPING = ("step", "time", "attempt")


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """The records of all whole steps, in order; a line that a crash cut short is left out."""
    return _read(run.metrics / METRICS_FILE)


class MetricsWriter:
    """Appends a record per step; after a crash and a resume each step still has exactly one."""

    def __init__(self, run: RunDir) -> None:
        """Nothing is written before the first record."""
        self._path = run.metrics / METRICS_FILE
        self._board_path = run.metrics / TENSORBOARD_DIRECTORY
        self._board: Any = None

    def truncate(self, step: int) -> None:
        """Forget what comes after ``step``, and what a crash left half written."""
        kept = [record for record in _read(self._path) if record["step"] <= step]
        publish_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self.close()

    def write(self, step: int, attempt: int, values: Mapping[str, float]) -> None:
        """Append the record of ``step`` and fsync it.

        The first record of a process replaces those of the same and of later steps, which an
        attempt before it wrote after its last checkpoint. Values that are not finite are written
        as null: JSON has no NaN.
        """
        if self._board is None:
            self.truncate(step - 1)
            self._board = _rebuild_board(self._board_path, _read(self._path))
        record: dict[str, Any] = {"step": step, "time": time.time(), "attempt": attempt}
        record |= {k: float(v) if math.isfinite(v) else None for k, v in sorted(values.items())}
        with self._path.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        _add(self._board, record)
        self._board.flush()

    def close(self) -> None:
        """Close the event file; a later record makes it again."""
        if self._board is not None:
            self._board.close()
            self._board = None


def _rebuild_board(directory: Path, records: list[dict[str, Any]]) -> Any:
    """Write the event file anew from ``records`` and return its writer.

    TensorBoard shows every event of every file in its directory, so that the steps which a resumed
    run repeats would be there twice; the whole directory is made again instead.
    """
    from torch.utils.tensorboard import SummaryWriter

    if directory.exists():
        shutil.rmtree(directory)
    writer = SummaryWriter(str(directory), max_queue=10_000)
    for record in records:
        _add(writer, record)
    return writer


def _add(writer: Any, record: Mapping[str, Any]) -> None:
    for name, value in record.items():
        if name not in _BOOKKEEPING and value is not None:
            writer.add_scalar(name, value, record["step"], walltime=record["time"])


def _read(path: Path) -> list[dict[str, Any]]:
    return parse_records(path.read_bytes()) if path.exists() else []


def parse_records(data: bytes) -> list[dict[str, Any]]:
    """Parse lines of JSON; what a killed process or a lost block of a filesystem left is skipped."""
    records = []
    for line in data.split(b"\n"):
        try:
            records.append(json.loads(line))
        except ValueError:  # not JSON, or not even text
            continue
    return records
