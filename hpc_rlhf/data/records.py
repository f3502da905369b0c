"""Reading records (JSON objects) from JSONL and Parquet, each with the line it came from."""

import gzip
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rlhf.errors import UserError

logger = logging.getLogger(__name__)

Record = dict[str, Any]

_PARQUET_MAGIC = b"PAR1"
_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_NAMED = 10
_MAX_DEPTH = 100  # what goes on with a record (templates, JSON again) is recursive, too
_TOO_DEEP = f"lists and objects are nested more than {_MAX_DEPTH} deep; is it a data set?"


class BadRecord(UserError):
    """One record cannot be used; the message begins with its place, ``file:line``."""


@dataclass
class BadRecords:
    """What becomes of the bad records of a file: the first is refused, or all are counted."""

    drop: bool
    count: int = 0

    def add(self, error: BadRecord) -> None:
        """Count it; the first ones are named in the log.

        Raises:
            UserError: bad records are not to be dropped.
        """
        if not self.drop:
            raise UserError(f"{error}; mend the file, or set data.bad_lines=drop") from error
        if self.count < _NAMED:
            logger.warning("dropped %s", error)
        self.count += 1


def read_records(path: Path) -> Iterator[tuple[int, Record | BadRecord]]:
    """Yield ``(line, record)`` in file order; a broken line yields its error in place of a record.

    JSONL, gzipped or not, or Parquet: told apart by their first bytes. Lines, and rows of Parquet,
    are counted from 1.

    Raises:
        UserError: the file is missing or unreadable.
    """
    if not path.is_file():
        state = "is a directory" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {state}; expected JSONL or Parquet")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if magic == _PARQUET_MAGIC:
        yield from _read_parquet(path)
    else:
        yield from _read_jsonl(path, gzipped=magic.startswith(_GZIP_MAGIC))


def _read_jsonl(path: Path, *, gzipped: bool) -> Iterator[tuple[int, Record | BadRecord]]:
    number = 0
    with gzip.open(path, "rb") if gzipped else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                try:
                    yield number, parse_line(line)
                except ValueError as error:
                    yield number, BadRecord(f"{path}:{number}: {error}")
        except (EOFError, gzip.BadGzipFile) as error:
            raise UserError(f"{path}: damaged gzip file after line {number}: {error}") from error


def parse_line(line: bytes) -> Record:
    """Parse one line of JSONL. NaN and infinity, which are Python's and not JSON, are read as null.

    Raises:
        ValueError: says what is wrong with it.
    """
    if line.startswith(_UTF8_BOM):
        raise ValueError("starts with a byte order mark; expected UTF-8 without one")
    if not line.strip():
        raise ValueError("blank line; expected one JSON object a line")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {line[error.start]:#04x} at {error.start}") from error
    try:
        record = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        hint = ", as if the line were cut short" if cut else ""
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}{hint}") from error
    if text.count("[") + text.count("{") > _MAX_DEPTH and _depth(record) > _MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    if "\\ud" in text.lower():  # only an escape can stand for half a character
        _check_characters(json.dumps(record, ensure_ascii=False))
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise ValueError(f"expected a JSON object, got {kind}")  # noqa: TRY004
    return record


def _depth(value: Any) -> int:
    """How deep lists and objects are nested in each other."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        level = [
            child for one in level for child in (one.values() if isinstance(one, dict) else one)
        ]
    return depth


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"\\u{ord(text[error.start]):04x} is half of a surrogate pair, and no character by itself; "
            "the text was cut in the middle of one"
        ) from None


def _no_number(name: str) -> None:
    """What ``json`` makes of NaN, Infinity and -Infinity."""


def _as_json(record: Mapping[str, Any]) -> Record:
    """A row as a line of JSONL would give it: dates, decimals and the like are text."""
    text = json.dumps(record, default=str)
    return dict(json.loads(text, parse_constant=_no_number))


def _read_parquet(path: Path) -> Iterator[tuple[int, Record | BadRecord]]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            row = 0
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    row += 1
                    yield row, _as_json(record)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a whole Parquet file: {error}") from error
