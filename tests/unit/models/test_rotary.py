import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hpc_rlhf.models.hf_layout import HfModelSpec, RopeSpec
from hpc_rlhf.models.rotary import RotaryAngles, rotary_frequencies

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 10,
    "max_position_embeddings": 131072,
}
LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 1000000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        LLAMA_3_1,
        {**LLAMA_3_1, "factor": 32.0},
        YARN,
        {**YARN, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    ],
)
def test_equals_transformers_to_the_bit(parameters: dict[str, Any]) -> None:
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=dict(parameters)))
    spec = HfModelSpec.from_config({**SIZES, "model_type": "llama", "rope_parameters": parameters})
    inverse, attention_factor = rotary_frequencies(spec.rope, spec.head_dim)
    assert torch.equal(inverse, theirs.inv_freq)
    assert attention_factor == theirs.attention_scaling


def test_llama3_keeps_short_wavelengths_and_divides_long_ones() -> None:
    rope = RopeSpec("llama3", 10000.0, factor=8.0, original_max_positions=64)
    plain, _ = rotary_frequencies(RopeSpec("default", 10000.0), 64)
    scaled, _ = rotary_frequencies(rope, 64)
    wavelengths = 2 * math.pi / plain
    assert torch.equal(scaled[wavelengths < 16], plain[wavelengths < 16])
    assert torch.equal(scaled[wavelengths > 64], plain[wavelengths > 64] / 8)
    between = (wavelengths > 16) & (wavelengths < 64)
    assert between.any() and (scaled[between] < plain[between]).all()


def test_angles_follow_the_positions() -> None:
    angles = RotaryAngles(RopeSpec("default", 10000.0), 4, torch.device("cpu"))
    found = angles(torch.tensor([0, 3, 0]))
    expected = torch.tensor([[0.0, 0.0], [3.0, 0.03], [0.0, 0.0]])
    torch.testing.assert_close(found[:, 0, 0], torch.cat((expected, expected), dim=-1))
    assert found.shape == (3, 1, 1, 4)
