from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_rlhf.data.chat import load_tokenizer
from hpc_rlhf.data.doctor import check_learning, check_pad_token
from hpc_rlhf.data.tiny import CHAT_TEMPLATE, make_tiny_model
from hpc_rlhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With generation_config.json, where <|im_end|> is an end token beside <eos>."""
    return make_tiny_model(tmp_path_factory.mktemp("doctor") / "model")


@pytest.fixture
def tokenizer(model: Path) -> "PreTrainedTokenizerBase":
    return load_tokenizer(model)


@pytest.mark.parametrize("chat", [True, False])
def test_what_is_right(tokenizer: "PreTrainedTokenizerBase", model: Path, chat: bool) -> None:
    check_learning(tokenizer, model, chat=chat)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHAT_TEMPLATE.replace("<|im_end|>", ""), "without an end token"),
        (CHAT_TEMPLATE.replace("<|im_end|>", "<|im_end|><|im_end|>"), "comes twice in a row"),
        ("{{ bos_token }}{{ bos_token }}" + CHAT_TEMPLATE, "<bos> comes twice in a row"),
        (
            CHAT_TEMPLATE.replace(
                "{{ message.content }}",
                "{{ message.content }}{% if not loop.last %} (answered){% endif %}",
            ),
            "is not how its text of more of them begins",
        ),
        (
            CHAT_TEMPLATE.replace("<|im_end|>", "{% generation %}<|im_end|>{% endgeneration %}"),
            "of the answer 'It is 8.' the chat template would have '' learned",
        ),
        ("{{ raise_exception('no') }}", "the chat template refuses it: no"),
    ],
)
def test_templates_that_would_teach_something_else(
    tokenizer: "PreTrainedTokenizerBase", model: Path, template: str, message: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message) as caught:
        check_learning(tokenizer, model, chat=True)
    assert str(caught.value).startswith(str(model))


def test_a_reward_models_padding_is_no_end(
    tokenizer: "PreTrainedTokenizerBase", model: Path
) -> None:
    assert check_pad_token(tokenizer, model, None) == ("<pad>", 0)
    assert check_pad_token(tokenizer, model, "<bos>") == ("<bos>", 1)
    tokenizer.pad_token = "<|im_end|>"
    with pytest.raises(
        UserError,
        match=r"token <\|im_end\|> also ends answers.*'reward_model\.pad_token=\"<pad>\"'",
    ):
        check_pad_token(tokenizer, model, None)
    with pytest.raises(UserError, match=r"reward_model\.pad_token='a': not a special token"):
        check_pad_token(tokenizer, model, "a")
