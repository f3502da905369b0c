"""Tokenizers: loading, special tokens, and prompts rendered with the chat template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rlhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a Hugging Face directory, never from the network.

    ``tokenizer.json`` alone defines the ids, so it is read as it is: without torch, and without the
    changes that a model's own tokenizer class makes to it. Older directories without it are
    converted by transformers.

    Raises:
        UserError: there is no tokenizer, or it does not load.
    """
    try:
        if (directory / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise bare Exception here
        raise UserError(
            f"{directory}: no tokenizer could be loaded ({_first_line(error)}); expected "
            "tokenizer.json and tokenizer_config.json beside config.json"
        ) from error


def eos_token_ids(tokenizer: "PreTrainedTokenizerBase", directory: Path) -> tuple[int, ...]:
    """Every token that ends a completion, ascending.

    Chat models often have several (the end of a turn and the end of a text): the tokenizer names
    one, ``generation_config.json`` and ``config.json`` the others.
    """
    ids: set[int] = set()
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise UserError(
                f"{path}: expected a JSON object ({error}). Download or copy it again"
            ) from None
        if isinstance(value, int):
            ids.add(value)
        elif isinstance(value, list):
            ids.update(int(token) for token in value)
    return tuple(sorted(ids))


def same_vocabulary(one: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase") -> bool:
    """Whether two tokenizers mean the same by every token id."""
    return one.get_vocab() == other.get_vocab()


def same_tokens(one: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase") -> bool:
    """Whether two tokenizers mean the same by every token id, and end and template a text alike."""
    return (
        same_vocabulary(one, other)
        and one.eos_token_id == other.eos_token_id
        and one.chat_template == other.chat_template
    )


def check_special_tokens(tokenizer: "PreTrainedTokenizerBase", directory: Path) -> None:
    """Refuse a tokenizer without a padding or an end token.

    A padding token that is also the end token is accepted: sequences are packed with an explicit
    loss mask, so that no token is masked for its id.

    Raises:
        UserError: names the entry of tokenizer_config.json to set.
    """
    for role, token, purpose in (
        ("eos_token", tokenizer.eos_token_id, "completions could not end"),
        ("pad_token", tokenizer.pad_token_id, "batches could not be padded"),
    ):
        if token is None:
            raise UserError(
                f"{directory / 'tokenizer_config.json'}: no {role}: {purpose}; set {role} to one "
                "of the vocabulary's special tokens"
            )


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Render messages with the chat template.

    The text holds the template's own special tokens: encode it without adding others.

    Args:
        add_generation_prompt: go on to where the assistant's answer begins.

    Raises:
        ValueError: the template refuses these messages.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses it: {_first_line(error)}") from error
    assert isinstance(text, str)
    return text


def check_chat_template(tokenizer: "PreTrainedTokenizerBase", directory: Path) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        UserError: says how to do without.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{directory}: the tokenizer has no chat template, which data.chat_template=true and "
            "data.format=messages need; use a chat model, add chat_template.jinja, or give plain "
            "text with data.format=text data.chat_template=false"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
