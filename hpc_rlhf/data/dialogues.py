"""Records of demonstrations and of pairs, in the formats that people have, as dialogues.

Which format a record is in shows from its fields (whose names are configured) and their types:

======================================  =====================================================
``messages``                            a conversation; every assistant turn is learned
``prompt``, ``completion``              text or messages; the completion is learned
``prompt``, ``chosen``, ``rejected``    text or messages
``chosen``, ``rejected`` of messages    what they have in common at the beginning is the prompt
``chosen``, ``rejected`` of text        Anthropic's transcripts (``\\n\\nHuman: ... \\n\\nAssistant:``)
======================================  =====================================================

These are TRL's conventions, so that a data set prepared for it can be used as it is.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rlhf.config import DataConfig
from hpc_rlhf.data.records import BadRecord

Message = Mapping[str, Any]
ASSISTANT = "assistant"

_MARKER = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": ASSISTANT}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What is given and what is learned: text that is continued, or messages.

    Of messages, the assistant's in ``answer`` are learned.
    """

    prompt: str | tuple[Message, ...]
    answer: str | tuple[Message, ...]


def is_chat(record: Mapping[str, Any], config: DataConfig) -> bool:
    """Whether a record's messages, or its text by configuration, go through the chat template."""
    fields = (config.messages_field, config.completion_field, config.chosen_field)
    return config.chat_template or any(isinstance(record.get(name), list) for name in fields)


def read_demonstration(record: Mapping[str, Any], config: DataConfig, *, place: str) -> Dialogue:
    """A record with messages, or with a prompt and its completion.

    Args:
        place: ``file:line``, for the error.

    Raises:
        BadRecord: it is neither, or has nothing to learn.
    """
    if config.messages_field in record:
        messages = _messages(record, config.messages_field, place)
        return _checked(_with_system(Dialogue((), messages), config), "the conversation", place)
    _require(record, config.completion_field, place, f"{config.messages_field!r}, or a prompt and")
    _require(record, config.prompt_field, place, "the prompt")
    prompt = _text_or_messages(record, config.prompt_field, place)
    completion = _text_or_messages(record, config.completion_field, place)
    dialogue = _dialogue(prompt, completion, config, place)
    return _checked(dialogue, config.completion_field, place)


def read_pair(
    record: Mapping[str, Any], config: DataConfig, *, place: str
) -> tuple[Dialogue, Dialogue]:
    """A record with a chosen and a rejected answer, as (chosen, rejected).

    Raises:
        BadRecord: one of them is missing or empty, or both are equal.
    """
    sides = []
    for name in (config.chosen_field, config.rejected_field):
        _require(record, name, place, "a pair")
        sides.append(_text_or_messages(record, name, place))
    chosen, rejected = sides
    if chosen == rejected:
        raise BadRecord(f"{place}: chosen and rejected are equal: nothing can be learned from it")
    prompt = record.get(config.prompt_field)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRecord(f"{place}: one of chosen and rejected is text, the other messages")
    if isinstance(chosen, tuple) and isinstance(rejected, tuple) and not isinstance(prompt, list):
        # a text prompt beside whole conversations only repeats their first message
        pair = _split_conversations(chosen, rejected, place)
        dialogues = [_with_system(dialogue, config) for dialogue in pair]
    elif prompt is None:
        assert isinstance(chosen, str) and isinstance(rejected, str)
        dialogues = list(_split_transcripts(chosen, rejected, config, place))
    else:
        given = _text_or_messages(record, config.prompt_field, place)
        dialogues = [_dialogue(given, side, config, place) for side in sides]
    names = (config.chosen_field, config.rejected_field)
    one, other = (_checked(d, name, place) for d, name in zip(dialogues, names, strict=True))
    return one, other


def read_margin(record: Mapping[str, Any], config: DataConfig, *, place: str) -> float:
    """The record's margin, 0 where none is configured.

    Raises:
        BadRecord: it is missing or not a finite number.
    """
    if config.margin_field is None:
        return 0.0
    _require(record, config.margin_field, place, "data.margin_field")
    value = record[config.margin_field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRecord(f"{place}: {config.margin_field!r} is {value!r}, expected a finite number")
    return float(value)


def _dialogue(
    prompt: str | tuple[Message, ...],
    answer: str | tuple[Message, ...],
    config: DataConfig,
    place: str,
) -> Dialogue:
    if isinstance(prompt, str) != isinstance(answer, str):
        raise BadRecord(f"{place}: prompt and answer must both be text, or both messages")
    if isinstance(prompt, str) and config.chat_template:
        prompt = ({"role": "user", "content": prompt},)
        answer = ({"role": ASSISTANT, "content": answer},)
    return _with_system(Dialogue(prompt, answer), config)


def _with_system(dialogue: Dialogue, config: DataConfig) -> Dialogue:
    """Put ``data.system`` in front of messages that have no system message of their own."""
    prompt, answer = dialogue.prompt, dialogue.answer
    if not config.system or isinstance(prompt, str) or isinstance(answer, str):
        return dialogue
    if (prompt + answer)[0]["role"] == "system":
        return dialogue
    return Dialogue(({"role": "system", "content": config.system}, *prompt), answer)


def _checked(dialogue: Dialogue, name: str, place: str) -> Dialogue:
    """Refuse an answer in which there is nothing to learn."""
    if isinstance(dialogue.answer, str):
        if not dialogue.answer.strip():
            raise BadRecord(f"{place}: {name}: the completion is empty")
        return dialogue
    learned = [m for m in dialogue.answer if m["role"] == ASSISTANT]
    if not learned:
        raise BadRecord(f"{place}: {name} has no assistant message to learn from")
    for message in learned:
        if not message.get("content") and not message.get("tool_calls"):
            raise BadRecord(f"{place}: {name}: an assistant message is empty")
    return dialogue


def _split_conversations(
    chosen: tuple[Message, ...], rejected: tuple[Message, ...], place: str
) -> tuple[Dialogue, Dialogue]:
    common = _common(chosen, rejected)
    for side in (chosen, rejected):
        if len(side) == common or side[common]["role"] != ASSISTANT:
            raise BadRecord(
                f"{place}: chosen and rejected must differ in what the assistant says, and differ "
                f"first in message {common + 1}, which is not the assistant's"
            )
    return (
        Dialogue(chosen[:common], chosen[common:]),
        Dialogue(rejected[:common], rejected[common:]),
    )


def _split_transcripts(
    chosen: str, rejected: str, config: DataConfig, place: str
) -> tuple[Dialogue, Dialogue]:
    """Anthropic's transcripts: the turns that both have in common are the prompt."""
    one, other = (_turns(text, place) for text in (chosen, rejected))
    if config.chat_template:
        pair = _split_conversations(tuple(one), tuple(other), place)
        first, second = (_with_system(dialogue, config) for dialogue in pair)
        return first, second
    common = _common(one, other)
    for turns in (one, other):
        if len(turns) != common + 1 or turns[-1]["role"] != ASSISTANT:
            raise BadRecord(
                f"{place}: transcripts must differ in the assistant's last turn only; differing "
                "earlier can be learned from with data.chat_template=true"
            )
    return _cut_transcript(chosen), _cut_transcript(rejected)


def _cut_transcript(text: str) -> Dialogue:
    """Cut behind the last marker; the blank behind it belongs to the answer."""
    *_, last = _MARKER.finditer(text)
    return Dialogue(text[: last.end()], text[last.end() :])


def _turns(text: str, place: str) -> list[dict[str, str]]:
    markers = list(_MARKER.finditer(text))
    if not markers or text[: markers[0].start()].strip():
        raise BadRecord(
            f"{place}: chosen and rejected are text and there is no prompt: expected Anthropic's "
            r"transcripts, which begin with '\n\nHuman:'"
        )
    ends = [marker.start() for marker in markers[1:]] + [len(text)]
    return [
        {"role": _ROLES[marker[1]], "content": text[marker.end() : end].strip()}
        for marker, end in zip(markers, ends, strict=True)
    ]


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _require(record: Mapping[str, Any], name: str, place: str, what: str) -> None:
    if record.get(name) is not None:
        return
    if name in record:
        raise BadRecord(f"{place}: {name!r} is null")
    keys = ", ".join(map(repr, record)) or "none"
    raise BadRecord(f"{place}: no key {name!r} (its keys: {keys}); expected {what} {name!r}")


def _text_or_messages(
    record: Mapping[str, Any], name: str, place: str
) -> str | tuple[Message, ...]:
    value = record[name]
    return value if isinstance(value, str) else _messages(record, name, place)


def _messages(record: Mapping[str, Any], name: str, place: str) -> tuple[Message, ...]:
    value = record[name]
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{place}: {name!r} is neither text nor a list of messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise BadRecord(f"{place}: {name!r}: message {index + 1} has no 'role' and 'content'")
    return tuple(value)
