"""Tiny random models of every supported family, made once per test session."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpc_rlhf.data.tiny import Family, make_tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # small, so that the tiny models' sequences reach all three of its regimes
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class TinyModel:
    """One variant; ``options`` are those of :func:`hpc_rlhf.data.tiny.make_tiny_model`."""

    family: Family
    options: dict[str, Any] = field(default_factory=dict)


TINY_MODELS = {
    "llama": TinyModel("llama"),
    "llama3-rope": TinyModel("llama", {"rope_scaling": LLAMA3_ROPE}),
    "qwen2-tied": TinyModel("qwen2", {"tied": True}),
    "qwen2-untied": TinyModel("qwen2"),
    "qwen2-yarn": TinyModel("qwen2", {"rope_scaling": YARN_ROPE}),
    "qwen3": TinyModel("qwen3", {"tied": True}),
}

# Divisible by TP=2, PP=2; the vocabulary is odd, so that shards are padded; head_dim is not
# hidden / heads; weights are large enough that every layer moves the logits, and no two norms or
# biases are equal.
SIZES = {
    "hidden": 64,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "intermediate": 96,
    "vocab_size": 267,
    "max_positions": 512,
    "init_std": 0.1,
    "vector_std": 0.2,
}


def make(name: str, directory: Path) -> Path:
    """Write the tiny model ``name`` (a key of :data:`TINY_MODELS`) to ``directory``."""
    model = TINY_MODELS[name]
    return make_tiny_model(directory, family=model.family, **SIZES, **model.options)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face directories by name: the keys of :data:`TINY_MODELS`."""
    root = tmp_path_factory.mktemp("tiny-models")
    return {name: make(name, root / name) for name in TINY_MODELS}
