"""Dialogues -> text with the characters to learn -> token ids with a loss mask.

The end token of an answer is always learned; what a chat template writes behind it is not, and a
sequence ends with the last token that is learned: there the policy stops, and a reward model scores.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_rlhf.data.chat import render_chat
from hpc_rlhf.data.dialogues import ASSISTANT, Dialogue, Message
from hpc_rlhf.types import TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RenderingError(ValueError):
    """A dialogue cannot be rendered so that what is to be learned is known."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text whose characters in ``spans`` [start, end) are to be learned."""

    text: str
    spans: tuple[tuple[int, int], ...]  # ascending, disjoint
    has_template: bool  # which wrote special tokens into the text; else they are added


def render(dialogue: Dialogue, tokenizer: "PreTrainedTokenizerBase") -> Rendered:
    """Render a dialogue, messages with the tokenizer's chat template.

    Where the template marks what the assistant generates (``{% generation %}``), that is learned.
    Else it is what the template adds for an assistant's message to the text of those before it,
    which must be how the whole text begins.

    Raises:
        RenderingError: the template refuses the messages, or its text of the first ones is not the
            beginning of its text of all.
    """
    prompt, answer = dialogue.prompt, dialogue.answer
    if isinstance(prompt, str):
        assert isinstance(answer, str)
        return Rendered(prompt + answer, ((len(prompt), len(prompt) + len(answer)),), False)
    assert not isinstance(answer, str)
    messages = [*prompt, *answer]
    while messages[-1]["role"] != ASSISTANT:  # behind the last answer there is nothing to learn
        messages.pop()
    if _GENERATION.search(tokenizer.chat_template or ""):
        text, spans = _marked(messages, len(prompt), tokenizer)
    else:
        text, spans = _differences(messages, len(prompt), tokenizer)
    return Rendered(text, tuple(spans), True)


def _marked(
    messages: list[Message], given: int, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    text = _text(tokenizer, messages, prompt=False)
    start = 0
    if given:
        before = _text(tokenizer, messages[:given], prompt=True)
        _check_prefix(before, text, given)
        start = len(before)
    variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
    # its annotation leaves out what it returns with the characters marked
    rendered: Any = render_jinja_template(
        conversations=[[dict(message) for message in messages]],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **variables,
    )
    (again,), (spans,) = rendered
    if again != text:
        raise RenderingError("the chat template renders the same messages in two ways")
    return text, [(a, b) for a, b in spans if a >= start]


def _differences(
    messages: list[Message], given: int, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[str, list[tuple[int, int]]]:
    whole = _text(tokenizer, messages, prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if index < given or message["role"] != ASSISTANT:
            continue
        # A conversation may begin with the assistant; templates differ in what they make of nothing.
        before = _text(tokenizer, messages[:index], prompt=True) if index else ""
        after = _text(tokenizer, messages[: index + 1], prompt=False)
        _check_prefix(before, after, index)
        _check_prefix(after, whole, index + 1)
        spans.append((len(before), len(after)))
    return whole, spans


def _check_prefix(beginning: str, text: str, count: int) -> None:
    if text.startswith(beginning):
        return
    same = next(i for i, c in enumerate(beginning) if text[i : i + 1] != c)
    raise RenderingError(
        f"the chat template's text of the first {count} messages is not how its text of more of them "
        f"begins, so that it does not show what the assistant says: {_around(beginning, same)} "
        f"became {_around(text, same)}; mark the assistant's text in the template with "
        "{% generation %} ... {% endgeneration %}, or give prompt and completion"
    )


def _around(text: str, position: int, width: int = 30) -> str:
    return repr(text[max(0, position - width) : position + width])


def _text(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], *, prompt: bool
) -> str:
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=prompt)
    except ValueError as error:
        raise RenderingError(str(error)) from error


def tokenize(
    rendered: Sequence[Rendered],
    tokenizer: "PreTrainedTokenizerBase",
    end_ids: Iterable[int],
    *,
    add_bos: bool = False,
) -> list[TokenSequence | RenderingError]:
    """Token ids and loss masks; a text that cannot be learned from yields its error instead.

    A token belongs to a span if all of its characters do. Where one would straddle the edge of a
    span, the text is cut there first: a sampler is given the prompt alone, too.

    Args:
        end_ids: tokens that end an answer; plain text gets the tokenizer's own one.
        add_bos: put the BOS token in front of plain text.
    """
    if not rendered:
        return []
    ends = frozenset(end_ids)
    encoded = tokenizer(
        [one.text for one in rendered],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
    )
    found: list[TokenSequence | RenderingError] = []
    for one, ids, offsets in zip(
        rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        try:
            found.append(_sequence(one, ids, offsets, tokenizer, ends, add_bos))
        except RenderingError as error:
            found.append(error)
    return found


def _sequence(
    rendered: Rendered,
    ids: list[int],
    offsets: list[tuple[int, int]],
    tokenizer: "PreTrainedTokenizerBase",
    ends: frozenset[int],
    add_bos: bool,
) -> TokenSequence:
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    edges = np.array([edge for span in rendered.spans for edge in span], np.int64)[:, None]
    if ((starts < edges) & (edges < stops)).any():
        ids, learned = _encode_pieces(rendered, tokenizer)
    else:
        learned = [(starts >= a) & (stops <= b) for a, b in rendered.spans]
    token_ids = np.array(ids, np.int32)
    if not rendered.has_template:
        (mask,) = learned
        return _with_special_tokens(token_ids, mask, tokenizer, add_bos)
    is_end = np.isin(token_ids, list(ends))
    mask = np.zeros(len(token_ids), np.bool_)
    for span in learned:
        last = np.flatnonzero(span & is_end)
        if not len(last):
            raise RenderingError(_no_end(token_ids[span], tokenizer, ends))
        mask |= span & (np.arange(len(span)) <= last[-1])
    length = int(np.flatnonzero(mask)[-1]) + 1
    return TokenSequence(token_ids[:length], mask[:length])


def _encode_pieces(
    rendered: Rendered, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[int], list[Any]]:
    """Encode the text between the edges of the spans piece by piece."""
    edges = [0, *(edge for span in rendered.spans for edge in span), len(rendered.text)]
    ids: list[int] = []
    bounds = []
    for start, end in pairwise(edges):
        first = len(ids)
        ids += tokenizer(rendered.text[start:end], add_special_tokens=False)["input_ids"]
        bounds.append((first, len(ids)))
    positions = np.arange(len(ids))
    return ids, [(positions >= a) & (positions < b) for a, b in bounds[1::2]]


def _with_special_tokens(
    token_ids: np.ndarray, mask: np.ndarray, tokenizer: "PreTrainedTokenizerBase", add_bos: bool
) -> TokenSequence:
    """BOS in front and EOS behind, unless the text has them."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if add_bos and (not len(token_ids) or token_ids[0] != bos):
        token_ids, mask = np.append([bos], token_ids), np.append([False], mask)
    if not len(token_ids) or token_ids[-1] != eos:
        token_ids, mask = np.append(token_ids, [eos]), np.append(mask, [True])
    return TokenSequence(token_ids.astype(np.int32), mask.astype(np.bool_))


def _no_end(answer: np.ndarray, tokenizer: "PreTrainedTokenizerBase", ends: frozenset[int]) -> str:
    known = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in sorted(ends))
    special = [int(i) for i in answer if i in tokenizer.all_special_ids]
    hint = (
        f"; it writes {tokenizer.convert_ids_to_tokens(special[-1])}: if that ends a turn, add "
        f"{special[-1]} to eos_token_id in generation_config.json"
        if special
        else ""
    )
    return (
        "the chat template ends an answer without an end token, so that the policy would not learn "
        f"to stop; expected one of {known}{hint}"
    )
