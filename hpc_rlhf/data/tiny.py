"""Tiny random models in Hugging Face format, with a byte-level tokenizer: no download, no torch.

The quickstart trains one of them; tests build theirs here too. Everything is a function of the
arguments: the same call writes the same bytes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hpc_rlhf.fs import publish_directory, share

Family = Literal["llama", "qwen2", "qwen3"]

PAD, BOS, EOS, TURN_START, TURN_END = "<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, TURN_START, TURN_END)
# Special tokens that no text uses bring 256 bytes to a vocabulary divisible by 8 tensor-parallel ranks.
RESERVED_TOKENS = tuple(f"<|reserved_{i}|>" for i in range(3))
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS) + len(RESERVED_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def byte_level_tokenizer() -> Tokenizer:
    """One token a UTF-8 byte, after the special tokens: any text encodes, no merges.

    Ids: pad 0, bos 1, eos 2, turn start 3, turn end 4, then reserved ones, then the bytes.
    """
    specials = [*SPECIAL_TOKENS, *RESERVED_TOKENS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def write_tokenizer(directory: Path, *, max_positions: int) -> None:
    """Write the byte-level tokenizer's files into an existing ``directory``."""
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "bos_token": BOS,
            "eos_token": EOS,
            "additional_special_tokens": [TURN_START, TURN_END, *RESERVED_TOKENS],
            "model_max_length": max_positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def make_tiny_model(
    directory: Path,
    *,
    family: Family = "llama",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    max_positions: int = 512,
    tied: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    init_std: float = 0.02,
    vector_std: float = 0.0,
    seed: int = 0,
) -> Path:
    """Write a randomly initialised float32 model as a Hugging Face directory, whole or not at all.

    Args:
        directory: the new directory; its parents are made.
        kv_heads: key/value heads (default: ``heads``).
        head_dim: default ``hidden // heads``. The CPU engine runs 32, 64, 80, 96, 112, 128, ... only.
        intermediate: width of the MLP (default: twice ``hidden``).
        vocab_size: rows of the embedding, at least :data:`VOCAB_SIZE`.
        tied: share the embedding with the output layer.
        rope_scaling: the ``rope_scaling`` entry of config.json, e.g. that of Llama 3.
        init_std: standard deviation of the weight matrices.
        vector_std: standard deviation of biases around 0 and of norm weights around 1. With the
            usual 0 a test cannot tell two norms apart.

    Raises:
        FileExistsError: ``directory`` exists.
        ValueError: sizes that do not fit together.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if head_dim is None:
        if hidden % heads:
            raise ValueError(f"hidden={hidden} is not divisible by heads={heads}; give head_dim")
        head_dim = hidden // heads
    if heads % kv_heads:
        raise ValueError(f"heads={heads} is not divisible by kv_heads={kv_heads}")
    if vocab_size < VOCAB_SIZE:
        raise ValueError(f"vocab_size={vocab_size} is less than the tokenizer's {VOCAB_SIZE}")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden if intermediate is None else intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "initializer_range": init_std,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "rope_scaling": None if rope_scaling is None else dict(rope_scaling),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    weights = _random_weights(config, vector_std=vector_std, seed=seed)

    def write(target: Path) -> None:
        # Imported here: the command line loads this module, and only makers of models pay for it.
        from safetensors.numpy import save_file

        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        share(target / "model.safetensors")
        _write_json(target / "config.json", config)
        ids = {key: config[key] for key in ("pad_token_id", "bos_token_id")}
        ends = [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(TURN_END)]
        _write_json(target / "generation_config.json", {**ids, "eos_token_id": ends})
        write_tokenizer(target, max_positions=max_positions)

    return publish_directory(directory, write)


def _random_weights(
    config: Mapping[str, Any], *, vector_std: float, seed: int
) -> dict[str, NDArray[np.float32]]:
    """Tensors by Hugging Face name; drawn in a fixed order from one generator."""
    family = config["model_type"]
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    query = config["num_attention_heads"] * head_dim
    key_value = config["num_key_value_heads"] * head_dim
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        drawn = rng.standard_normal((rows, columns), np.float32)
        return (config["initializer_range"] * drawn).astype(np.float32)

    def vector(size: int, centre: float) -> NDArray[np.float32]:
        return (centre + vector_std * rng.standard_normal(size, np.float32)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value)):
            weights[f"{prefix}.self_attn.{name}.weight"] = matrix(rows, hidden)
            if family == "qwen2":
                weights[f"{prefix}.self_attn.{name}.bias"] = vector(rows, 0.0)
        weights[f"{prefix}.self_attn.o_proj.weight"] = matrix(hidden, query)
        if family == "qwen3":
            weights[f"{prefix}.self_attn.q_norm.weight"] = vector(head_dim, 1.0)
            weights[f"{prefix}.self_attn.k_norm.weight"] = vector(head_dim, 1.0)
        weights[f"{prefix}.mlp.gate_proj.weight"] = matrix(intermediate, hidden)
        weights[f"{prefix}.mlp.up_proj.weight"] = matrix(intermediate, hidden)
        weights[f"{prefix}.mlp.down_proj.weight"] = matrix(hidden, intermediate)
        weights[f"{prefix}.input_layernorm.weight"] = vector(hidden, 1.0)
        weights[f"{prefix}.post_attention_layernorm.weight"] = vector(hidden, 1.0)
    weights["model.norm.weight"] = vector(hidden, 1.0)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return weights


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
