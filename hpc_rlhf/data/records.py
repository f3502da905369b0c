"""Reading records (JSON objects) from JSONL and Parquet, each with the line it came from."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_rlhf.errors import UserError

Record = dict[str, Any]

_PARQUET_MAGIC = b"PAR1"
_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"


class BadRecord(UserError):
    """One record cannot be used; the message begins with its place, ``file:line``."""


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
    """Parse one line of JSONL.

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
        record = json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        hint = ", as if the line were cut short" if cut else ""
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}{hint}") from error
    if "\\ud" in text.lower():  # only an escape can stand for half a character
        _check_characters(json.dumps(record, ensure_ascii=False))
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise ValueError(f"expected a JSON object, got {kind}")  # noqa: TRY004
    return record


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"\\u{ord(text[error.start]):04x} is half of a surrogate pair, and no character by itself; "
            "the text was cut in the middle of one"
        ) from None


def _read_parquet(path: Path) -> Iterator[tuple[int, Record | BadRecord]]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            row = 0
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    row += 1
                    yield row, record
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a whole Parquet file: {error}") from error
