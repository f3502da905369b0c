import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_rlhf.data.chat import (
    check_chat_template,
    check_special_tokens,
    eos_token_ids,
    load_tokenizer,
    render_chat,
)
from hpc_rlhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _without(directory: Path, target: Path, *keys: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer with entries of its configuration left out."""
    shutil.copytree(directory, target)
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in keys}))
    return load_tokenizer(target)


@pytest.mark.parametrize("role", ["pad_token", "eos_token"])
def test_a_missing_special_token_is_named(
    tokenizer_directory: Path, tmp_path: Path, role: str
) -> None:
    directory = tmp_path / "t"
    tokenizer = _without(tokenizer_directory, directory, role)
    with pytest.raises(
        UserError, match=rf"tokenizer_config\.json: no {role}: .*; set {role} to one"
    ):
        check_special_tokens(tokenizer, directory)


def test_pad_may_be_eos(tokenizer: "PreTrainedTokenizerBase", tokenizer_directory: Path) -> None:
    check_special_tokens(tokenizer, tokenizer_directory)
    same = load_tokenizer(tokenizer_directory)
    same.pad_token = same.eos_token
    check_special_tokens(same, tokenizer_directory)


def test_all_end_tokens_are_found(tokenizer: "PreTrainedTokenizerBase", tmp_path: Path) -> None:
    assert eos_token_ids(tokenizer, tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 2]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert eos_token_ids(tokenizer, tmp_path) == (2, 4, 7)
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert eos_token_ids(tokenizer, tmp_path) == (2, 4)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer could be loaded .*expected tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)


def test_the_rendered_chat_ends_where_the_answer_begins(
    tokenizer: "PreTrainedTokenizerBase",
) -> None:
    text = render_chat(tokenizer, [{"role": "user", "content": "3+5="}])
    assert text == "<|im_start|>user\n3+5=<|im_end|>\n<|im_start|>assistant\n"


def test_what_a_template_refuses_is_its_own_message(tokenizer_directory: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_directory)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="the chat template refuses it: roles must alternate"):
        render_chat(tokenizer, [{"role": "user", "content": "3+5="}])


def test_no_chat_template(tokenizer_directory: Path, tmp_path: Path) -> None:
    tokenizer = _without(tokenizer_directory, tmp_path / "t", "chat_template")
    with pytest.raises(UserError, match=r"has no chat template.*data\.format=text"):
        check_chat_template(tokenizer, tmp_path / "t")
