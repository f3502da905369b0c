"""Tokenised data sets: made once, named by a hash of all they depend on, memory-mapped.

A data set is a directory of NumPy files (N examples of W sequences, S = N x W, T tokens):

================  ============  =====================================================
``tokens.npy``    int32 [T]     all sequences end to end
``mask.npy``      bool [T]      what is to be learned
``offsets.npy``   int64 [S+1]   sequence s is ``tokens[offsets[s]:offsets[s + 1]]``
``lines.npy``     int64 [N]     line of the file that the example comes from
``margins.npy``   float32 [N]
``meta.json``                   format, W, name and sha256 of the file, what was dropped or cut
================  ============  =====================================================

It appears whole, so that the command line and several runs may make it at the same time.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpc_rlhf.config import DataConfig, LongSequences
from hpc_rlhf.data.chat import eos_token_ids
from hpc_rlhf.data.dialogues import Dialogue, read_demonstration, read_margin, read_pair
from hpc_rlhf.data.lengths import TooLong, span
from hpc_rlhf.data.prompts import DROP, file_sha256
from hpc_rlhf.data.records import BadRecord, BadRecords, Record, read_records
from hpc_rlhf.data.rendering import Rendered, RenderingError, render, tokenize
from hpc_rlhf.errors import UserError
from hpc_rlhf.fs import publish_directory, publish_json, read_json, write_failure
from hpc_rlhf.types import Example, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

T = TypeVar("T")
FORMAT = 2  # part of the hash: change it with anything that changes the tokens
_CHUNK = 1024  # records handed to the tokenizer at once; it uses all cores on them
_ARRAYS: dict[str, Any] = {
    "tokens": np.int32,
    "mask": np.bool_,
    "offsets": np.int64,
    "lines": np.int64,
    "margins": np.float32,
}


@dataclass(frozen=True)
class TokenDataset:
    """Examples of one file, in file order; arrays are memory-mapped."""

    path: Path
    name: str  # of the file
    sha256: str  # of the file
    width: int  # sequences of an example
    dropped: Mapping[str, int]  # reason -> count
    long: TooLong  # cut or dropped, as ``data.long_sequences`` says
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    lines: NDArray[np.int64]
    margins: NDArray[np.float32]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a data set that :func:`prepare` made.

        Raises:
            UserError: it is damaged.
        """
        try:
            meta = read_json(path / "meta.json")
            arrays = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
            if len(arrays["tokens"]) != arrays["offsets"][-1]:
                raise ValueError("other tokens than offsets")
            return cls(
                path=path,
                name=meta["name"],
                sha256=meta["sha256"],
                width=meta["width"],
                dropped=meta["dropped"],
                long=TooLong(**meta["long"]),
                **arrays,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: tokenised data that is damaged ({type(error).__name__}: {error}); delete this "
                "directory, and it is made again"
            ) from error

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Example:
        first = index * self.width
        bounds = self.offsets[first : first + self.width + 1]
        return Example(
            uid=f"{self.name}:{self.lines[index]}",
            sequences=tuple(
                TokenSequence(np.array(self.tokens[a:b]), np.array(self.mask[a:b]))
                for a, b in pairwise(bounds)
            ),
            margin=float(self.margins[index]),
        )

    def examples(self, indices: Iterable[int]) -> list[Example]:
        return [self[int(index)] for index in indices]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, [N, W]."""
        return np.diff(self.offsets).reshape(-1, self.width)


def prepare(
    path: Path,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    model: Path,
    *,
    pairs: bool,
    max_tokens: int,
    cache: Path,
    progress: Callable[[int], None] | None = None,
) -> TokenDataset:
    """The tokenised examples of ``path``: those in ``cache`` if they were made from the same.

    Args:
        model: the tokenizer's directory, for its end tokens.
        pairs: of chosen and rejected answers; else demonstrations.
        max_tokens: of one sequence; ``data.long_sequences`` says what becomes of longer ones.
        progress: called now and then with the number of lines that are done.

    Raises:
        UserError: the file is missing or has nothing usable; a record is bad and the configuration
            does not say to drop it; some are too long and it does not say what becomes of them. Names
            file and line.
    """
    if not path.is_file():
        next(read_records(path))  # says what is wrong with it
    source = _Source(
        path=path,
        sha256=file_sha256(path),
        config=config,
        tokenizer=tokenizer,
        end_ids=eos_token_ids(tokenizer, model),
        pairs=pairs,
        max_tokens=max_tokens,
    )
    target = cache / source.key
    if not target.exists():
        try:
            publish_directory(target, lambda directory: _write(directory, source, progress))
        except OSError as error:
            if not target.is_dir():  # else another run was faster, and made the same
                failure = write_failure(error, cache, setting="data.cache")
                raise UserError(f"data.cache={cache}: {failure}") from error
    dataset = TokenDataset.open(target)
    for line in describe(dataset, config):
        logger.info("%s: %s", path, line)
    return dataset


def describe(dataset: TokenDataset, config: DataConfig) -> Iterator[str]:
    """What a data set holds and what was lost of its records, in a line or two."""
    what = "pairs" if dataset.width == 2 else "demonstrations"
    dropped = "".join(f", dropped {count} {reason}" for reason, count in dataset.dropped.items())
    yield f"{len(dataset)} {what}, {span(dataset.lengths)}{dropped}"
    long, mode = dataset.long, config.long_sequences
    if long.count and mode is not LongSequences.DROP:
        yield (
            f"{long.count} of them are longer than model.max_sequence_tokens={long.limit} (the longest "
            f"has {long.longest} tokens, line {long.line}) and were cut: data.long_sequences={mode} "
            f"loses {_LOST[mode]}"
        )


_LOST = {
    LongSequences.KEEP_START: "the end of the completion and its end token",
    LongSequences.KEEP_END: "the beginning of the prompt",
}


@dataclass(frozen=True)
class _Source:
    """Everything that the tokens depend on."""

    path: Path
    sha256: str
    config: DataConfig
    tokenizer: "PreTrainedTokenizerBase"
    end_ids: tuple[int, ...]
    pairs: bool
    max_tokens: int

    @property
    def key(self) -> str:
        """Hash of all of it: no file in the cache is ever out of date."""
        tokenizer, config = self.tokenizer, self.config
        vocabulary = (
            tokenizer.backend_tokenizer.to_str()
            if tokenizer.is_fast
            else json.dumps(tokenizer.get_vocab(), sort_keys=True)
        )
        parts = {
            "format": FORMAT,
            "name": self.path.name,
            "data": self.sha256,
            "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest(),
            "template": tokenizer.chat_template,
            "special": tokenizer.special_tokens_map,
            "ends": self.end_ids,
            "pairs": self.pairs,
            "max_tokens": self.max_tokens,
            "settings": {
                name: getattr(config, name)
                for name in (
                    *("prompt_field", "messages_field", "completion_field", "chosen_field"),
                    *("rejected_field", "margin_field", "system", "chat_template", "add_bos"),
                    *("bad_lines", "long_sequences"),
                )
            },
        }
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write(directory: Path, source: _Source, progress: Callable[[int], None] | None) -> None:
    bad, long = BadRecords(source.config.bad_lines == DROP), TooLong(source.max_tokens)
    writers = {name: _NpyWriter(directory / f"{name}.npy", d) for name, d in _ARRAYS.items()}
    count = end = 0
    writers["offsets"].append([0])
    for line, sequences, margin in _examples(source, bad, long, progress):
        for sequence in sequences:
            writers["tokens"].append(sequence.token_ids)
            writers["mask"].append(sequence.loss_mask)
            end += len(sequence.token_ids)
            writers["offsets"].append([end])
        writers["lines"].append([line])
        writers["margins"].append([margin])
        count += 1
    what = "pair" if source.pairs else "demonstration"
    if long.count and source.config.long_sequences is LongSequences.ERROR:
        raise UserError(_too_long(long, count + long.count, what, source))
    dropped = {"bad lines": bad.count}
    if source.config.long_sequences is LongSequences.DROP:
        dropped["long sequences"] = long.count
    dropped = {reason: n for reason, n in dropped.items() if n}
    if not count:
        counts = ", ".join(f"{n} {reason}" for reason, n in dropped.items())
        raise UserError(
            f"{source.path}: no usable {what} ({'dropped ' + counts if counts else 'it is empty'})"
        )
    for writer in writers.values():
        writer.close()
    publish_json(
        directory / "meta.json",
        {
            "format": FORMAT,
            "name": source.path.name,
            "sha256": source.sha256,
            "width": 2 if source.pairs else 1,
            "dropped": dropped,
            "long": asdict(long),
        },
    )


def _too_long(long: TooLong, of: int, what: str, source: _Source) -> str:
    return (
        f"{source.path}:{long.line}: {long.longest} tokens, more than model.max_sequence_tokens="
        f"{long.limit}; {long.count} of {of} {what}s are too long, and this is the longest. Raise it, "
        "or set data.long_sequences=drop (leave them out), keep_start (lose "
        f"{_LOST[LongSequences.KEEP_START]}) or keep_end (lose {_LOST[LongSequences.KEEP_END]})"
    )


def _examples(
    source: _Source,
    bad: BadRecords,
    long: TooLong,
    progress: Callable[[int], None] | None,
) -> Iterator[tuple[int, tuple[TokenSequence, ...], float]]:
    """Line, sequences and margin of every usable record; the others are refused or counted."""
    config = source.config
    for chunk in _batched(read_records(source.path), _CHUNK):
        drafts: list[tuple[int, list[Rendered], float]] = []
        for line, record in chunk:
            place = f"{source.path}:{line}"
            try:
                if isinstance(record, BadRecord):
                    raise record
                dialogues = _dialogues(record, source, place)
                rendered = [_rendered(d, source.tokenizer, place) for d in dialogues]
                drafts.append((line, rendered, read_margin(record, config, place=place)))
            except BadRecord as error:
                bad.add(error)
        flat = tokenize(
            [one for _, rendered, _ in drafts for one in rendered],
            source.tokenizer,
            source.end_ids,
            add_bos=config.add_bos,
        )
        width = 2 if source.pairs else 1
        for (line, _, margin), found in zip(drafts, _batched(flat, width), strict=True):
            try:
                sequences = _fitted(found, source, f"{source.path}:{line}")
            except BadRecord as error:
                bad.add(error)
                continue
            length = max(len(one.token_ids) for one in found if isinstance(one, TokenSequence))
            if length > source.max_tokens:
                long.add(line, length)
            if sequences is not None:
                yield line, sequences, margin
        if progress is not None:
            progress(chunk[-1][0])


def _dialogues(record: Record, source: _Source, place: str) -> tuple[Dialogue, ...]:
    if source.pairs:
        return read_pair(record, source.config, place=place)
    return (read_demonstration(record, source.config, place=place),)


def _rendered(dialogue: Dialogue, tokenizer: "PreTrainedTokenizerBase", place: str) -> Rendered:
    try:
        return render(dialogue, tokenizer)
    except RenderingError as error:
        raise BadRecord(f"{place}: {error}") from error


def _fitted(
    found: tuple[TokenSequence | RenderingError, ...], source: _Source, place: str
) -> tuple[TokenSequence, ...] | None:
    """The sequences within the limit; None if they are too long and not to be cut.

    Raises:
        BadRecord: nothing is left to learn.
    """
    sequences = []
    for sequence in found:
        if isinstance(sequence, RenderingError):
            raise BadRecord(f"{place}: {sequence}") from sequence
        length = len(sequence.token_ids)
        if length > source.max_tokens:
            match source.config.long_sequences:
                case LongSequences.ERROR | LongSequences.DROP:
                    return None
                case LongSequences.KEEP_START:
                    part = slice(0, source.max_tokens)
                case LongSequences.KEEP_END:
                    part = slice(length - source.max_tokens, length)
            sequence = TokenSequence(sequence.token_ids[part], sequence.loss_mask[part])
        if not sequence.loss_mask[1:].any():
            reason = (
                f"the completion begins behind model.max_sequence_tokens={source.max_tokens}"
                if length > source.max_tokens
                else "the prompt and the completion have a single token"
            )
            raise BadRecord(f"{place}: nothing is left to learn: {reason}")
        sequences.append(sequence)
    if source.pairs and np.array_equal(sequences[0].token_ids, sequences[1].token_ids):
        raise BadRecord(
            f"{place}: chosen and rejected have the same tokens"
            f" (within model.max_sequence_tokens={source.max_tokens}): nothing can be learned from it"
        )
    return tuple(sequences)


def _batched(values: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """``itertools.batched`` of Python 3.12."""
    iterator = iter(values)
    while batch := tuple(islice(iterator, size)):
        yield batch


class _NpyWriter:
    """A one-dimensional .npy file that grows: memory does not bound the data set."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self._file = path.open("wb")
        self._dtype = np.dtype(dtype)
        self._count = 0
        self._header()

    def append(self, values: Any) -> None:
        array = np.asarray(values, self._dtype)
        self._file.write(array.tobytes())
        self._count += array.size

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _header(self) -> None:
        """NumPy pads headers so that the first dimension can grow in place."""
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (self._count,),
            },
        )
