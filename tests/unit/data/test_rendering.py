"""What is learned of a dialogue, token by token, under templates that people have."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hpc_rlhf.data.chat import load_tokenizer
from hpc_rlhf.data.dialogues import Dialogue
from hpc_rlhf.data.rendering import Rendered, RenderingError, render, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USER, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
MORE, BYE = {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "See you"}
ENDS = (2, 4)  # <eos>, <|im_end|>

# marks what the assistant says, its end token included
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# like Qwen3's: earlier answers are rendered without their thoughts
STRIPPED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _learned(
    dialogue: Dialogue, tokenizer: "PreTrainedTokenizerBase", ends: Any = ENDS, **options: Any
) -> tuple[str, list[str]]:
    """The text of all tokens, and that of each run of learned ones."""
    (found,) = tokenize([render(dialogue, tokenizer)], tokenizer, ends, **options)
    if isinstance(found, RenderingError):
        raise found
    runs: list[list[int]] = []
    for index in np.flatnonzero(found.loss_mask):
        if not runs or runs[-1][-1] != index - 1:
            runs.append([])
        runs[-1].append(int(index))
    texts = [str(tokenizer.decode(found.token_ids[run])) for run in runs]
    return str(tokenizer.decode(found.token_ids)), texts


@pytest.fixture(params=["by prefix", "by marks"])
def chat(request: pytest.FixtureRequest, tokenizer_directory: Path) -> "PreTrainedTokenizerBase":
    tokenizer = load_tokenizer(tokenizer_directory)
    if request.param == "by marks":
        tokenizer.chat_template = MARKED
    return tokenizer


def test_every_answer_is_learned_with_its_end(chat: "PreTrainedTokenizerBase") -> None:
    text, learned = _learned(Dialogue((), (USER, HELLO, MORE, BYE)), chat)
    assert learned == ["Hello<|im_end|>", "See you<|im_end|>"]
    assert text.endswith("See you<|im_end|>")  # nothing behind the last token that is learned


def test_the_prompts_answers_are_not_learned(chat: "PreTrainedTokenizerBase") -> None:
    _, learned = _learned(Dialogue((USER, HELLO, MORE), (BYE,)), chat)
    assert learned == ["See you<|im_end|>"]


def test_what_follows_the_last_answer_is_cut(chat: "PreTrainedTokenizerBase") -> None:
    text, learned = _learned(Dialogue((), (USER, HELLO, MORE)), chat)
    assert learned == ["Hello<|im_end|>"]
    assert "Bye" not in text


def test_a_conversation_that_the_assistant_begins(chat: "PreTrainedTokenizerBase") -> None:
    _, learned = _learned(Dialogue((), (HELLO, USER, BYE)), chat)
    assert learned[-1] == "See you<|im_end|>"
    assert "Hello<|im_end|>" in learned[0]


def test_a_template_that_rewrites_the_past_is_refused_with_an_example(
    tokenizer_directory: Path,
) -> None:
    tokenizer = load_tokenizer(tokenizer_directory)
    tokenizer.chat_template = STRIPPED
    with pytest.raises(RenderingError, match=r"first 2 messages .*<think>Hello.* became .*Hello"):
        render(Dialogue((), (USER, HELLO, MORE, BYE)), tokenizer)
    assert _learned(Dialogue((USER,), (HELLO,)), tokenizer)[1] == ["<think>Hello<|im_end|>"]


def test_an_answer_without_an_end_token_is_refused(chat: "PreTrainedTokenizerBase") -> None:
    with pytest.raises(
        RenderingError, match=r"without an end token.*expected one of <eos> \(2\)"
    ) as caught:
        _learned(Dialogue((USER,), (HELLO,)), chat, ends=(2,))
    assert "add 4 to eos_token_id in generation_config.json" in str(caught.value)


def test_text_gets_its_special_tokens_once(tokenizer: "PreTrainedTokenizerBase") -> None:
    assert _learned(Dialogue("3+5=", "8"), tokenizer) == ("3+5=8<eos>", ["8<eos>"])
    assert _learned(Dialogue("3+5=", "8<eos>"), tokenizer) == ("3+5=8<eos>", ["8<eos>"])
    for prompt in ("3+5=", "<bos>3+5="):
        text, _ = _learned(Dialogue(prompt, "8"), tokenizer, add_bos=True)
        assert text == "<bos>3+5=8<eos>"


def test_the_end_is_learned_where_it_is_the_padding_token(tokenizer_directory: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_directory)
    tokenizer.pad_token = tokenizer.eos_token
    assert _learned(Dialogue("3+5=", "8"), tokenizer)[1] == ["8<eos>"]


def test_a_token_across_the_edge_is_cut_there() -> None:
    """The sampler is given the prompt by itself: "a b" is not to become the token "ab" of both."""
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "</s>": 4}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")
    across = Rendered("cab", ((2, 3),), False)
    beside = Rendered("abc", ((2, 3),), False)
    found = tokenize([across, beside], tokenizer, (4,))
    ids = [s.token_ids.tolist() for s in found if not isinstance(s, RenderingError)]
    masks = [s.loss_mask.tolist() for s in found if not isinstance(s, RenderingError)]
    assert ids == [[2, 0, 1, 4], [3, 2, 4]]
    assert masks == [[False, False, True, True], [False, True, True]]


def test_characters_of_several_bytes_stay_on_their_side(
    tokenizer: "PreTrainedTokenizerBase",
) -> None:
    assert _learned(Dialogue("é=", "ü"), tokenizer)[1] == ["ü<eos>"]
