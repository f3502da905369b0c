"""What can be wrong with a tokenizer and its chat template, found before anything is learned."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpc_rlhf.data.chat import eos_token_ids
from hpc_rlhf.data.dialogues import Dialogue
from hpc_rlhf.data.rendering import RenderingError, render, tokenize
from hpc_rlhf.errors import UserError
from hpc_rlhf.types import TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _ANSWER = "What is 3+5?", "It is 8."
# No system message: some templates refuse one.
_ONE_TURN = (
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWER},
)


def check_learning(tokenizer: "PreTrainedTokenizerBase", directory: Path, *, chat: bool) -> None:
    """Tokenise small dialogues as training will, and look at what is learned.

    The end token must be learned, once; special tokens must not be doubled; the answer must be what
    is learned. That a padding token may be the end token is no fault: masks are explicit.

    Args:
        chat: messages under the chat template; else plain text.

    Raises:
        UserError: says what to change in the template or the tokenizer's files.
    """
    ends = eos_token_ids(tokenizer, directory)
    dialogue = Dialogue(_ONE_TURN[:1], _ONE_TURN[1:]) if chat else Dialogue(_QUESTION, " It is 8.")
    try:
        (found,) = tokenize([render(dialogue, tokenizer)], tokenizer, ends)
    except RenderingError as error:
        raise UserError(f"{directory}: {error}") from error
    if isinstance(found, RenderingError):
        raise UserError(f"{directory}: {found}")
    _check_doubled(found, tokenizer, directory)
    learned = str(tokenizer.decode(found.token_ids[found.loss_mask], skip_special_tokens=True))
    if learned.strip() != _ANSWER:
        raise UserError(
            f"{directory}: of the answer {_ANSWER!r} the chat template would have {learned!r} learned; "
            "put {% generation %} ... {% endgeneration %} around the assistant's text"
        )


def check_pad_token(
    tokenizer: "PreTrainedTokenizerBase", directory: Path, pad_token: str | None
) -> tuple[str, int]:
    """Text and id of the padding token of a reward model.

    Hugging Face reads the score at the last token that is not padding. Were that the end token, it
    would be read one token too early.

    Args:
        pad_token: ``reward_model.pad_token``; default: the tokenizer's.

    Raises:
        UserError: it ends answers, or is a token of text; names others.
    """
    text = str(pad_token or tokenizer.pad_token)
    added = tokenizer.get_added_vocab()
    index = added.get(text)
    ends = eos_token_ids(tokenizer, directory)
    others = [
        str(token) for token, i in sorted(added.items(), key=lambda item: item[1]) if i not in ends
    ]
    # quoted for Hydra and the shell, which both read < and | their own way
    choose = "give another special token: " + (
        " or ".join(f"'reward_model.pad_token=\"{token}\"'" for token in others[:2])
        or "it has none"
    )
    if index is None:
        raise UserError(
            f"reward_model.pad_token={text!r}: not a special token of {directory}; {choose}"
        )
    if index in ends:
        raise UserError(
            f"{directory}: the padding token {text} also ends answers, so that Hugging Face would read "
            f"a reward model's score one token before the end; {choose}"
        )
    return text, int(index)


def _check_doubled(
    sequence: TokenSequence, tokenizer: "PreTrainedTokenizerBase", directory: Path
) -> None:
    ids = sequence.token_ids
    special = np.isin(ids, tokenizer.all_special_ids)
    doubled = np.flatnonzero((ids[1:] == ids[:-1]) & special[1:])
    if len(doubled):
        token = tokenizer.convert_ids_to_tokens(int(ids[doubled[0]]))
        raise UserError(
            f"{directory}: {token} comes twice in a row; the chat template and the tokenizer both "
            "write it: take it out of one of them"
        )
