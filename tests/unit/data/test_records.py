"""Every way a data file can be wrong is named with file and line; the good lines still come."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_rlhf.data.records import BadRecord, parse_line, read_records
from hpc_rlhf.errors import UserError

GOOD = b'{"prompt": "3+5=", "answer": "8"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "3+5=", "ans', "as if the line were cut short"),
        (b'{"prompt": "3+5=",', "as if the line were cut short"),
        (b"{'prompt': 1}", "not JSON: Expecting property name"),
        (b"", "blank line"),
        (b"   ", "blank line"),
        (b"\xef\xbb\xbf" + GOOD, "byte order mark"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at 12"),
        (b'{"prompt": "3+5=\\ud83d"}', "\\ud83d is half of a surrogate pair"),
        (b'{"messages": [{"content": "\\uDC00a"}]}', "\\udc00 is half of a surrogate pair"),
        (b'{"prompt\\ud800": 1}', "\\ud800 is half"),
        (b"[" * 100_000, "nested more than 100 deep"),
        (b'{"a": ' * 500 + b"1" + b"}" * 500, "nested more than 100 deep"),
        (b"[1, 2]", "expected a JSON object, got list"),
        (b"\x00\x00\x00", "not JSON"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\n".join([GOOD, line, GOOD]) + b"\n")
    (first, good), (second, bad), (third, _) = read_records(path)
    assert (first, second, third) == (1, 2, 3)
    assert good == {"prompt": "3+5=", "answer": "8"}
    assert isinstance(bad, BadRecord)
    assert str(bad).startswith(f"{path}:2: ")
    assert message in str(bad)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert parse_line(b'{"prompt": "\\ud83d\\ude00 \\\\ud800"}') == {"prompt": "\U0001f600 \\ud800"}


def test_no_numbers_are_null() -> None:
    line = b'{"a": NaN, "b": [Infinity, 1.5], "c": "NaN"}'
    assert parse_line(line) == {"a": None, "b": [None, 1.5], "c": "NaN"}


def test_many_messages_are_not_deep() -> None:
    assert len(parse_line(b'{"m": [' + b"[[1], {}]," * 500 + b"1]}")["m"]) == 501


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD)
    assert [line for line, _ in read_records(path)] == [1, 2]


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(gzip.compress(GOOD + b"\n"))
    assert list(read_records(path)) == [(1, {"prompt": "3+5=", "answer": "8"})]
    path.write_bytes(gzip.compress(GOOD * 100)[:-20])
    with pytest.raises(UserError, match="damaged gzip file"):
        list(read_records(path))


def test_parquet_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "data"
    rows = [{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, {"prompt": "c"}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    records = list(read_records(path))
    assert records[0] == (1, rows[0])
    assert records[1] == (2, {"prompt": "c", "messages": None})
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match="not a whole Parquet file"):
        list(read_records(path))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.jsonl: no such file; expected JSONL or Parquet"):
        list(read_records(tmp_path / "absent.jsonl"))
    with pytest.raises(UserError, match="is a directory"):
        list(read_records(tmp_path))


def test_non_ascii_text_is_kept() -> None:
    assert parse_line('{"prompt": "é\\u00e9"}'.encode()) == {"prompt": "éé"}
