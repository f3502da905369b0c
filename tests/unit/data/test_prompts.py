import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_rlhf.config import DataConfig, PromptFormat
from hpc_rlhf.data.chat import load_tokenizer
from hpc_rlhf.data.prompts import PromptCursor, PromptDataset, file_sha256, read_answer
from hpc_rlhf.errors import UserError
from hpc_rlhf.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _write(path: Path, records: list[Any]) -> DataConfig:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(prompts=str(path))


def _load(
    config: DataConfig, tokenizer: "PreTrainedTokenizerBase", max_sequence_tokens: int = 512
) -> PromptDataset:
    return PromptDataset.load(config, tokenizer, max_sequence_tokens=max_sequence_tokens)


def test_plain_text_is_tokenised_as_it_is(
    tmp_path: Path, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    config = _write(tmp_path / "p.jsonl", [{"prompt": "3+5=", "answer": 8, "level": "easy"}])
    dataset = _load(config, tokenizer)
    (prompt,) = dataset.prompts
    assert prompt.uid == "p.jsonl:1"
    assert prompt.token_ids.tolist() == tokenizer.encode("3+5=", add_special_tokens=False)
    assert prompt.token_ids.dtype == np.int32
    assert prompt.answer == "8"
    assert prompt.fields["level"] == "easy"
    assert dataset.dropped == {}
    assert dataset.sha256 == file_sha256(tmp_path / "p.jsonl")


def test_bos_is_added_where_asked_for(tmp_path: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    config = _write(tmp_path / "p.jsonl", [{"prompt": "3", "answer": "3"}])
    (prompt,) = _load(replace(config, add_bos=True), tokenizer).prompts
    assert prompt.token_ids.tolist() == [1, *tokenizer.encode("3", add_special_tokens=False)]


def test_the_chat_template_brings_its_special_tokens_once(
    tmp_path: Path, tokenizer_directory: Path
) -> None:
    tokenizer = load_tokenizer(tokenizer_directory)
    tokenizer.chat_template = "<bos>" + str(tokenizer.chat_template)
    config = _write(tmp_path / "p.jsonl", [{"prompt": "3+5=", "answer": "8"}])
    config = replace(config, chat_template=True, system="be brief")
    ids = _load(config, tokenizer).prompts[0].token_ids.tolist()
    assert tokenizer.decode(ids) == (
        "<bos><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n3+5=<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids.count(1) == 1  # BOS
    assert ids.count(3) == 3  # the start of a turn is one token, not ten bytes


def test_messages_and_text_render_alike(
    tmp_path: Path, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    as_text = _write(tmp_path / "t.jsonl", [{"prompt": "3+5=", "answer": "8"}])
    messages = [{"role": "user", "content": "3+5="}]
    as_messages = _write(tmp_path / "m.jsonl", [{"messages": messages, "answer": "8"}])
    a = _load(replace(as_text, chat_template=True), tokenizer)
    b = _load(
        replace(as_messages, format=PromptFormat.MESSAGES, prompt_field="messages"), tokenizer
    )
    assert a.prompts[0].token_ids.tolist() == b.prompts[0].token_ids.tolist()


def test_answers_by_pattern(tmp_path: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    records = [
        {"question": "?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4 "},
        {"question": "?", "answer": "no answer here"},
    ]
    config = _write(tmp_path / "p.jsonl", records[:1])
    config = replace(config, prompt_field="question", answer_pattern=r"####\s*(.+)")
    assert _load(config, tokenizer).prompts[0].answer == "4"
    _write(tmp_path / "p.jsonl", records)
    with pytest.raises(UserError, match=r"p\.jsonl:2: data\.answer_pattern=.* not found in"):
        _load(config, tokenizer)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (72, "72"),
        (72.0, "72"),
        (-0.5, "-0.5"),
        (1e-7, "0.0000001"),
        (1e22, "1" + "0" * 22),
        ("a", "a"),
    ],
)
def test_numbers_as_answers(answer: Any, text: str) -> None:
    config = DataConfig()
    assert read_answer({"answer": answer}, config, place="p:1", exact=True) == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "answer": ""}', "'answer' is empty; reward.name=exact compares"),
        ('{"prompt": "a", "answer": "#"}', "'answer' is empty; reward.name=exact compares"),
        ('{"prompt": "a", "answer": ["8"]}', "'answer' is of type list; reward.name=exact"),
        ('{"prompt": "a", "answer": {"a": 8}}', "'answer' is of type dict; reward.name=exact"),
        ('{"prompt": "a", "answer": true}', "'answer' is of type bool; reward.name=exact"),
        ('{"prompt": "a", "answer": null}', "'answer' is null"),
        ('{"prompt": "a", "answer": NaN}', "'answer' is null, or no number"),
        ('{"prompt": "a", "answer": -Infinity}', "'answer' is null, or no number"),
    ],
)
def test_an_answer_that_no_completion_can_match(
    line: str, message: str, tmp_path: Path, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n")
    config = DataConfig(prompts=str(path), answer_pattern="^#?(.*)")
    with pytest.raises(UserError) as caught:
        PromptDataset.load(config, tokenizer, max_sequence_tokens=32, exact=True)
    assert str(caught.value).startswith(f"{path}:2: {message}")


def test_a_verifier_in_python_gets_any_answer() -> None:
    value = {"answer": [1, "a"]}
    assert read_answer(value, DataConfig(), place="p:1") == '[1, "a"]'


def test_parquet_gives_the_same_prompts(
    tmp_path: Path, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    records = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(3000)]
    jsonl = _load(_write(tmp_path / "p.jsonl", records), tokenizer)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    parquet = _load(DataConfig(prompts=str(tmp_path / "p.parquet")), tokenizer)
    assert len(jsonl) == len(parquet) == 3000
    for a, b in zip(jsonl.prompts, parquet.prompts, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.answer == b.answer
    assert parquet.prompts[-1].uid == "p.parquet:3000"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "a"}, "no key 'prompt' (its keys: 'question'); data.prompt_field names it"),
        ({"prompt": "a"}, "no key 'answer' (its keys: 'prompt'); data.answer_field names it, null"),
        ({"prompt": None, "answer": "1"}, "'prompt' is null"),
        ({"prompt": ["a"], "answer": "1"}, "'prompt' is of type list, expected text"),
        ({"prompt": "", "answer": "1"}, "the prompt has no tokens"),
    ],
)
def test_bad_records_are_errors_or_dropped_and_counted(
    tmp_path: Path, tokenizer: "PreTrainedTokenizerBase", record: Any, message: str
) -> None:
    good = {"prompt": "3+5=", "answer": "8"}
    config = _write(tmp_path / "p.jsonl", [good, record, good])
    with pytest.raises(UserError) as caught:
        _load(config, tokenizer)
    assert str(caught.value).startswith(f"{config.prompts}:2: {message}")
    assert "data.bad_lines=drop" in str(caught.value)
    dataset = _load(replace(config, bad_lines="drop"), tokenizer)
    assert [prompt.uid for prompt in dataset.prompts] == ["p.jsonl:1", "p.jsonl:3"]
    assert dataset.dropped == {"bad lines": 1}


@pytest.mark.parametrize("value", [[], ["hello"], [{"role": "user"}], "hello"])
def test_bad_messages(tmp_path: Path, tokenizer: "PreTrainedTokenizerBase", value: Any) -> None:
    config = _write(tmp_path / "p.jsonl", [{"prompt": value, "answer": "1"}])
    with pytest.raises(UserError, match=r"p\.jsonl:1: 'prompt'.*message"):
        _load(replace(config, format=PromptFormat.MESSAGES), tokenizer)


def test_long_prompts(tmp_path: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    records = [{"prompt": "x" * n, "answer": "1"} for n in (10, 11, 12)]
    config = replace(_write(tmp_path / "p.jsonl", records), max_prompt_tokens=11)
    with pytest.raises(
        UserError,
        match=r"p\.jsonl:3: the prompt has 12 tokens, more than data\.max_prompt_tokens=11",
    ):
        _load(config, tokenizer)
    with pytest.raises(
        UserError,
        match=r"p\.jsonl:3: the prompt has 12 tokens, more than model\.max_seq.*=11 less.* 2 of 3 pr",
    ):
        _load(config, tokenizer, max_sequence_tokens=11)
    dataset = _load(replace(config, long_prompts="drop"), tokenizer)
    assert [len(prompt.token_ids) for prompt in dataset.prompts] == [10, 11]
    assert dataset.dropped == {"long prompts": 1}
    assert dataset.describe() == "2 prompts, 10 to 11 tokens (median 10), dropped 1 long prompts"


def test_a_file_without_a_usable_prompt(
    tmp_path: Path, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    config = _write(tmp_path / "p.jsonl", [])
    with pytest.raises(UserError, match=r"p\.jsonl: no usable prompt \(it is empty\)"):
        _load(config, tokenizer)
    _write(tmp_path / "p.jsonl", [{"prompt": "x" * 99, "answer": "1"}])
    with pytest.raises(UserError, match=r"no usable prompt \(dropped 1 long prompts\)"):
        _load(replace(config, max_prompt_tokens=5, long_prompts="drop"), tokenizer)


# ------------------------------------------------------------------------------------------ the order


def _dataset(size: int, *, shuffle: bool = True) -> PromptDataset:
    prompts = tuple(
        Prompt(uid=f"p.jsonl:{i}", token_ids=np.array([i], np.int32)) for i in range(size)
    )
    return PromptDataset(prompts, sha256="", shuffle=shuffle)


def _uids(dataset: PromptDataset, batches: int, size: int, seed: int = 0) -> list[str]:
    cursor, uids = PromptCursor(), []
    for _ in range(batches):
        batch, cursor = dataset.batch(cursor, size, seed)
        uids += [prompt.uid for prompt in batch]
    return uids


def test_every_epoch_is_a_permutation_and_batches_span_epochs() -> None:
    uids = _uids(_dataset(10), batches=10, size=3)
    epochs = [uids[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_cursor_is_all_there_is_to_resume() -> None:
    straight = _uids(_dataset(10), batches=9, size=4)
    dataset, cursor, uids = _dataset(10), PromptCursor(), []
    for _ in range(9):  # a process a batch
        batch, cursor = dataset.batch(PromptCursor(**vars(cursor)), 4, seed=0)
        uids += [prompt.uid for prompt in batch]
        dataset = _dataset(10)
    assert uids == straight


def test_a_batch_may_be_larger_than_the_data_set() -> None:
    batch, cursor = _dataset(3).batch(PromptCursor(), 8, seed=0)
    assert len(batch) == 8
    assert cursor == PromptCursor(epoch=2, position=2)


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    batch, cursor = _dataset(4).batch(PromptCursor(), 4, seed=0)
    assert len(batch) == 4
    assert cursor == PromptCursor(epoch=1, position=0)


def test_the_order_depends_on_the_seed_and_on_nothing_else() -> None:
    assert _uids(_dataset(10), 2, 5, seed=0) != _uids(_dataset(10), 2, 5, seed=1)
    # Written down: a run that is resumed with other versions of everything must continue this order.
    assert _uids(_dataset(5), 1, 5) == [f"p.jsonl:{i}" for i in (0, 4, 3, 1, 2)]
    assert _uids(_dataset(3, shuffle=False), 2, 3) == [f"p.jsonl:{i}" for i in (0, 1, 2)] * 2


def test_a_cursor_of_another_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="outside of a data set of 3 prompts"):
        _dataset(3).batch(PromptCursor(0, 7), 1, seed=0)
