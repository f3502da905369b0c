"""Prompts from JSONL or Parquet, tokenised once, served in an order that can be resumed."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpc_rlhf.config import DataConfig, PromptFormat
from hpc_rlhf.data.chat import render_chat
from hpc_rlhf.data.lengths import TooLong, span
from hpc_rlhf.data.records import BadRecord, BadRecords, read_records
from hpc_rlhf.errors import UserError
from hpc_rlhf.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ERROR, DROP = "error", "drop"
"""What to do with a bad line or a long prompt."""

_CHUNK = 1024  # prompts handed to the tokenizer at once; it uses all cores on them


@dataclass(frozen=True)
class PromptCursor:
    """Where the next batch begins: a position in the permutation of an epoch."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class PromptDataset:
    """All prompts of one file, in file order; :meth:`batch` shuffles."""

    prompts: tuple[Prompt, ...]
    sha256: str  # of the file
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> count
    shuffle: bool = True
    _orders: dict[tuple[int, int], list[int]] = field(default_factory=dict, repr=False)

    @classmethod
    def load(
        cls,
        config: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        max_sequence_tokens: int,
        exact: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> "PromptDataset":
        """Read and tokenise the prompts.

        Everything is kept in memory: 4 bytes a token, and the records themselves.

        Args:
            max_sequence_tokens: a prompt must leave room for at least one more token.
            exact: answers are compared with completions, so one that none can match is bad.
            progress: called now and then with the number of lines that are done.

        Raises:
            UserError: the file is missing or has no usable prompt; a line is bad or a prompt too
                long and the configuration does not say to drop it. Names file and line.
        """
        assert config.prompts is not None
        path = Path(config.prompts)
        limit = min(config.max_prompt_tokens, max_sequence_tokens - 1)
        bad, long = BadRecords(config.bad_lines == DROP), TooLong(limit)
        prompts: list[Prompt] = []
        records = read_records(path)
        while chunk := list(islice(records, _CHUNK)):
            drafts = []
            for line, record in chunk:
                try:
                    if isinstance(record, BadRecord):
                        raise record
                    text = render_prompt(record, config, tokenizer, place=f"{path}:{line}")
                    answer = read_answer(record, config, place=f"{path}:{line}", exact=exact)
                    drafts.append((line, record, text, answer))
                except BadRecord as error:
                    bad.add(error)
            encoded = encode_texts([text for _, _, text, _ in drafts], config, tokenizer)
            for (line, record, _, answer), token_ids in zip(drafts, encoded, strict=True):
                if len(token_ids) == 0:
                    bad.add(BadRecord(f"{path}:{line}: the prompt has no tokens"))
                elif len(token_ids) > limit:
                    long.add(line, len(token_ids))
                else:
                    uid = f"{path.name}:{line}"
                    prompts.append(
                        Prompt(uid=uid, token_ids=token_ids, answer=answer, fields=record)
                    )
            if progress is not None:
                progress(chunk[-1][0])
        if long.count and config.long_prompts != DROP:
            raise UserError(_too_long(path, long, len(prompts) + long.count, config))
        dropped = {"bad lines": bad.count, "long prompts": long.count}
        dropped = {reason: count for reason, count in dropped.items() if count}
        if not prompts:
            counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
            raise UserError(
                f"{path}: no usable prompt ({'dropped ' + counts if counts else 'it is empty'})"
            )
        dataset = cls(tuple(prompts), file_sha256(path), dropped, config.shuffle)
        logger.info("%s: %s", path, dataset.describe())
        return dataset

    def __len__(self) -> int:
        return len(self.prompts)

    def describe(self) -> str:
        """How many prompts of how many tokens there are, and how many were dropped."""
        lengths = np.array([len(prompt.token_ids) for prompt in self.prompts])
        dropped = "".join(f", dropped {count} {reason}" for reason, count in self.dropped.items())
        return f"{len(self)} prompts, {span(lengths)}{dropped}"

    def batch(
        self, cursor: PromptCursor, size: int, seed: int
    ) -> tuple[list[Prompt], PromptCursor]:
        """The next ``size`` prompts, and the cursor behind them.

        A function of its arguments: a resumed run continues the order exactly. Every prompt comes
        once an epoch; a batch at the end of an epoch is filled from the next.
        """
        if not 0 <= cursor.position < len(self):
            raise ValueError(f"{cursor} is outside of a data set of {len(self)} prompts")
        batch: list[Prompt] = []
        epoch, position = cursor.epoch, cursor.position
        while len(batch) < size:
            taken = self._order(epoch, seed)[position : position + size - len(batch)]
            batch += [self.prompts[index] for index in taken]
            position += len(taken)
            if position == len(self):
                epoch, position = epoch + 1, 0
        return batch, PromptCursor(epoch, position)

    def _order(self, epoch: int, seed: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self)))
        if (seed, epoch) not in self._orders:
            # By hash, not by a library's generator: the order of a run that is resumed next year
            # must not depend on the NumPy of next year.
            keys = [
                hashlib.blake2b(f"{seed}:{epoch}:{prompt.uid}".encode(), digest_size=16).digest()
                for prompt in self.prompts
            ]
            self._orders.clear()  # one epoch at a time
            self._orders[seed, epoch] = sorted(range(len(self)), key=keys.__getitem__)
        return self._orders[seed, epoch]


def read_prompt(
    record: Mapping[str, Any], config: DataConfig, *, place: str
) -> str | tuple[Mapping[str, Any], ...]:
    """A record's prompt: text that is continued, or the messages of a chat.

    Args:
        place: ``file:line``, for the error.

    Raises:
        BadRecord: the field is missing, or not of the configured format.
    """
    value = _field(record, config.prompt_field, "data.prompt_field", place)
    messages: list[Mapping[str, Any]] = []
    if config.system:
        messages.append({"role": "system", "content": config.system})
    if config.format is PromptFormat.MESSAGES:
        messages += _messages(value, config.prompt_field, place)
    elif not isinstance(value, str):
        raise BadRecord(
            f"{place}: {config.prompt_field!r} is of type {type(value).__name__}, expected text "
            "(a list of messages needs data.format=messages)"
        )
    elif config.chat_template:
        messages.append({"role": "user", "content": value})
    else:
        return value
    return tuple(messages)


def render_prompt(
    record: Mapping[str, Any],
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    place: str,
) -> str:
    """The text of a record's prompt, the chat template applied where configured.

    Raises:
        BadRecord: as :func:`read_prompt`, or the template refuses the messages.
    """
    prompt = read_prompt(record, config, place=place)
    if isinstance(prompt, str):
        return prompt
    try:
        return render_chat(tokenizer, prompt)
    except ValueError as error:
        raise BadRecord(f"{place}: {error}") from error


def read_answer(
    record: Mapping[str, Any], config: DataConfig, *, place: str, exact: bool = False
) -> str | None:
    """A record's answer as text; None without ``data.answer_field``.

    A number is its shortest decimal, without a fraction of zero: pandas makes floats of integers as
    soon as one is missing. Lists and objects are JSON, for verifiers in Python.

    Args:
        exact: it is compared with completions.

    Raises:
        BadRecord: the field is missing, or ``data.answer_pattern`` is not found in it, or no completion
            is equal to it.

    Example:
        >>> read_answer({"answer": 72.0}, DataConfig(), place="p.jsonl:1")
        '72'
    """
    if config.answer_field is None:
        return None
    value = _field(record, config.answer_field, "data.answer_field", place)
    if exact and (isinstance(value, bool) or not isinstance(value, str | int | float)):
        raise BadRecord(
            f"{place}: {config.answer_field!r} is of type {type(value).__name__}; reward.name=exact "
            "compares it with what is written, expected text or a number"
        )
    text = _answer_text(value)
    if config.answer_pattern is not None:
        text = _find_answer(text, config, place)
    if exact and not text.strip():
        raise BadRecord(
            f"{place}: {config.answer_field!r} is empty; reward.name=exact compares it with what is "
            "written"
        )
    return text


def _answer_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")
    return json.dumps(value)


def _find_answer(text: str, config: DataConfig, place: str) -> str:
    assert config.answer_pattern is not None
    match = re.search(config.answer_pattern, text)
    if match is None:
        raise BadRecord(
            f"{place}: data.answer_pattern={config.answer_pattern!r} is not found in "
            f"{config.answer_field!r}"
        )
    return (match.group(1) or "").strip()  # the group may be optional


def encode_texts(
    texts: Sequence[str], config: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[NDArray[np.int32]]:
    """Token ids of rendered prompts, one array [P] each.

    No special tokens are added but the BOS that ``data.add_bos`` asks for: a chat template has
    written its own into the text.
    """
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    plain = config.format is PromptFormat.TEXT and not config.chat_template
    bos = [tokenizer.bos_token_id] if config.add_bos and plain else []
    return [np.array(bos + ids, dtype=np.int32) for ids in encoded["input_ids"]]


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _field(record: Mapping[str, Any], name: str, option: str, place: str) -> Any:
    value = record.get(name)
    if value is not None:
        return value
    if name in record:
        raise BadRecord(f"{place}: {name!r} is null, or no number")
    keys = ", ".join(map(repr, record)) or "none"
    optional = ", null for no answers" if option == "data.answer_field" else ""
    raise BadRecord(f"{place}: no key {name!r} (its keys: {keys}); {option} names it{optional}")


def _messages(value: Any, name: str, place: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{place}: {name!r} is not a list of messages, or an empty one")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise BadRecord(f"{place}: {name!r}: message {index} has no 'role' and 'content'")
    return value


def _too_long(path: Path, long: TooLong, of: int, config: DataConfig) -> str:
    bound = (
        f"data.max_prompt_tokens={long.limit}"
        if long.limit == config.max_prompt_tokens
        else f"model.max_sequence_tokens={long.limit + 1} less one to sample"
    )
    return (
        f"{path}:{long.line}: the prompt has {long.longest} tokens, more than {bound}; "
        f"{long.count} of {of} prompts are too long, and this is the longest. Raise the limit, or set "
        "data.long_prompts=drop"
    )
