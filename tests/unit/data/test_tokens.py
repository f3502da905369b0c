"""Tokenised data sets: made once, whole, and of the records that can be learned from."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from hpc_rlhf.config import DataConfig, LongSequences
from hpc_rlhf.data import tokens
from hpc_rlhf.data.tokens import TokenDataset
from hpc_rlhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAIRS = [
    {"prompt": "3+5=", "chosen": "8", "rejected": "9", "m": 0.5},
    {"prompt": "1+1=", "chosen": "2", "rejected": "11", "m": 2},
]
Prepare = Callable[..., TokenDataset]


@pytest.fixture
def prepare(
    tmp_path: Path, tokenizer: "PreTrainedTokenizerBase", tokenizer_directory: Path
) -> Prepare:
    def call(
        path: Path, *, pairs: bool = True, max_tokens: int = 32, **settings: Any
    ) -> TokenDataset:
        return tokens.prepare(
            path,
            DataConfig(**settings),
            tokenizer,
            tokenizer_directory,
            pairs=pairs,
            max_tokens=max_tokens,
            cache=tmp_path / "cache",
        )

    return call


def _write(path: Path, records: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.parquet"])
def test_pairs(
    name: str, tmp_path: Path, prepare: Prepare, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    dataset = prepare(_write(tmp_path / name, PAIRS), margin_field="m")
    assert len(dataset) == 2
    assert dataset.lengths.tolist() == [[6, 6], [6, 7]]
    second = dataset[1]
    assert second.uid == f"{name}:2"
    assert second.margin == 2.0
    texts = [tokenizer.decode(s.token_ids) for s in second.sequences]
    assert texts == ["1+1=2<eos>", "1+1=11<eos>"]
    assert [int(s.loss_mask.sum()) for s in second.sequences] == [2, 3]


def test_demonstrations_in_two_formats(tmp_path: Path, prepare: Prepare) -> None:
    records = [
        {"prompt": "3+5=", "completion": "8"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    dataset = prepare(_write(tmp_path / "d.jsonl", records), pairs=False)
    assert dataset.width == 1
    assert dataset[0].sequences[0].loss_mask.tolist() == [False] * 4 + [True] * 2
    assert dataset[1].sequences[0].loss_mask.sum() == 2


def test_it_is_made_once_and_again_when_anything_changes(tmp_path: Path, prepare: Prepare) -> None:
    path = _write(tmp_path / "p.jsonl", PAIRS)
    first = prepare(path).path
    inode = first.stat().st_ino
    assert prepare(path).path.stat().st_ino == inode
    others = {
        prepare(path, max_tokens=31).path,
        prepare(path, add_bos=True).path,
        prepare(path, chat_template=True).path,
        prepare(path, bad_lines="drop").path,
    }
    _write(path, PAIRS[:1])
    others.add(prepare(path).path)
    assert len(others | {first}) == 6
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == sorted(
        p.name for p in others | {first}
    )


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy", "meta.json"])
def test_a_damaged_data_set_is_named(name: str, tmp_path: Path, prepare: Prepare) -> None:
    path = _write(tmp_path / "p.jsonl", PAIRS)
    made = prepare(path).path
    (made / name).write_bytes((made / name).read_bytes()[:-4])
    with pytest.raises(UserError, match=rf"{made}: tokenised data that is damaged .*delete this"):
        prepare(path)


def test_nothing_is_left_of_a_data_set_that_failed(tmp_path: Path, prepare: Prepare) -> None:
    path = _write(tmp_path / "p.jsonl", [*PAIRS, {"prompt": "a"}])
    with pytest.raises(UserError, match=r"p\.jsonl:3: no key 'chosen'.*data\.bad_lines=drop"):
        prepare(path)
    assert list((tmp_path / "cache").iterdir()) == []
    dataset = prepare(path, bad_lines="drop")
    assert len(dataset) == 2
    assert dataset.dropped == {"bad lines": 1}


def test_a_broken_line_is_named(tmp_path: Path, prepare: Prepare) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(PAIRS[0]) + '\n{"prompt": "a\n')
    with pytest.raises(UserError, match=r"p\.jsonl:2: not JSON"):
        prepare(path)


@pytest.mark.parametrize("text", ["", '{"prompt": "a"}\n'])
def test_nothing_usable(text: str, tmp_path: Path, prepare: Prepare) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match="no usable pair"):
        prepare(path, bad_lines="drop")


def test_a_missing_file(tmp_path: Path, prepare: Prepare) -> None:
    with pytest.raises(UserError, match="no such file"):
        prepare(tmp_path / "absent.jsonl")


LONG = {"prompt": "0123456789", "chosen": "abc", "rejected": "abd"}


@pytest.mark.parametrize(
    ("mode", "max_tokens", "expected"),
    [
        (LongSequences.KEEP_START, 13, ["0123456789abc", "0123456789abd"]),
        (LongSequences.KEEP_END, 6, ["89abc<eos>", "89abd<eos>"]),
    ],
)
def test_long_sequences_are_cut(
    mode: LongSequences,
    max_tokens: int,
    expected: list[str],
    tmp_path: Path,
    prepare: Prepare,
    tokenizer: "PreTrainedTokenizerBase",
) -> None:
    path = _write(tmp_path / "p.jsonl", [LONG])
    dataset = prepare(path, max_tokens=max_tokens, long_sequences=mode)
    assert [tokenizer.decode(s.token_ids) for s in dataset[0].sequences] == expected


DEMONSTRATIONS = [{"prompt": "0123", "completion": "a" * n} for n in (3, 9, 1, 12)]


def test_what_is_cut_is_counted(tmp_path: Path, prepare: Prepare) -> None:
    """Also by a run that finds the data set made."""
    path = _write(tmp_path / "d.jsonl", [*DEMONSTRATIONS, {"prompt": "a"}])
    for _ in range(2):
        dataset = prepare(
            path, pairs=False, max_tokens=10, long_sequences="keep_start", bad_lines="drop"
        )
        assert (dataset.long.count, dataset.long.longest, dataset.long.line) == (2, 17, 4)
        holds, cut = tokens.describe(dataset, DataConfig(long_sequences=LongSequences.KEEP_START))
        assert holds == "4 demonstrations, 6 to 10 tokens (median 9), dropped 1 bad lines"
        assert cut == (
            "2 of them are longer than model.max_sequence_tokens=10 (the longest has 17 tokens, "
            "line 4) and were cut: data.long_sequences=keep_start loses the end of the completion and "
            "its end token"
        )
    config = DataConfig(long_sequences=LongSequences.DROP)
    dataset = prepare(_write(path, DEMONSTRATIONS), pairs=False, max_tokens=10, **vars(config))
    assert list(tokens.describe(dataset, config)) == [
        "2 demonstrations, 6 to 8 tokens (median 7), dropped 2 long sequences"
    ]


def test_sequences_that_are_too_long_are_counted_before_they_are_refused(
    tmp_path: Path, prepare: Prepare
) -> None:
    path = _write(tmp_path / "d.jsonl", DEMONSTRATIONS)
    with pytest.raises(UserError) as caught:
        prepare(path, pairs=False, max_tokens=10)
    assert str(caught.value).startswith(
        f"{path}:4: 17 tokens, more than model.max_sequence_tokens=10; 2 of 4 demonstrations are too "
        "long, and this is the longest. Raise it, or set data.long_sequences=drop"
    )
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "max_tokens", "message"),
    [
        (
            LongSequences.ERROR,
            13,
            r"p\.jsonl:1: 14 tokens, more than model\.max_sequence_tokens=13",
        ),
        (LongSequences.KEEP_START, 10, "nothing is left to learn: the completion begins behind"),
        (LongSequences.KEEP_START, 12, "chosen and rejected have the same tokens .within"),
        (LongSequences.DROP, 13, "no usable pair .dropped 1 long sequences"),
    ],
)
def test_what_is_too_long_to_be_learned(
    mode: LongSequences, max_tokens: int, message: str, tmp_path: Path, prepare: Prepare
) -> None:
    path = _write(tmp_path / "p.jsonl", [LONG])
    with pytest.raises(UserError, match=message):
        prepare(path, max_tokens=max_tokens, long_sequences=mode)


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, tokenizer: "PreTrainedTokenizerBase", tokenizer_directory: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache=.*cannot write .*file: "):
        tokens.prepare(
            _write(tmp_path / "p.jsonl", PAIRS),
            DataConfig(),
            tokenizer,
            tokenizer_directory,
            pairs=True,
            max_tokens=32,
            cache=tmp_path / "file",
        )
