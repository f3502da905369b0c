"""What tiny.py writes is what transformers would have: it loads whole, and nothing is made up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpc_rlhf.data.chat import load_tokenizer
from hpc_rlhf.data.tiny import VOCAB_SIZE, Family, byte_level_tokenizer, make_tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"tied": True, "rope_scaling": LLAMA3_ROPE}),
        ("qwen2", {"kv_heads": 1, "vector_std": 0.1}),
        ("qwen3", {"tied": True, "head_dim": 64}),
    ],
)
def test_transformers_loads_every_family_whole(
    tmp_path: Path, family: Family, options: dict[str, Any]
) -> None:
    directory = make_tiny_model(tmp_path / "model", family=family, **options)
    model, loading = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(loading.values()), loading
    assert model.config.model_type == family
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    written = load_file(directory / "model.safetensors")
    state = model.state_dict()
    tied = {"lm_head.weight"} if options.get("tied") else set()
    assert set(written) == set(state) - tied
    assert all((state[name].numpy() == tensor).all() for name, tensor in written.items())
    if "rope_scaling" in options:
        assert model.config.rope_parameters["rope_type"] == "llama3"


def test_the_same_call_writes_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (
        make_tiny_model(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    for path in first.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name
    weights = "model.safetensors"
    assert (first / weights).read_bytes() != (other / weights).read_bytes()


def test_an_existing_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    with pytest.raises(FileExistsError, match="exists"):
        make_tiny_model(tmp_path / "model")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 65}, "hidden=65 is not divisible by heads=2"),
        ({"heads": 4, "kv_heads": 3}, "heads=4 is not divisible by kv_heads=3"),
        ({"vocab_size": 100}, "less than the tokenizer's"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tiny_model(tmp_path / "model", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = byte_level_tokenizer()
    text = "3+5=8 é 你好 \n\t 😀"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == 264
    assert tokenizer.encode("<bos>a<eos>").ids == [1, tokenizer.encode("a").ids[0], 2]


def test_the_tokenizer_is_the_same_for_the_learner_and_for_other_programs(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model")
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "3+5="}]
    for tokenizer in (ours, theirs):
        assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
        assert len(tokenizer) == VOCAB_SIZE
    text = ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n3+5=<|im_end|>\n<|im_start|>assistant\n"
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.encode(text) == theirs.encode(text)
    assert json.loads((directory / "config.json").read_text())["vocab_size"] == VOCAB_SIZE
