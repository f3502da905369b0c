import dataclasses
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hpc_rlhf.errors import UserError
from hpc_rlhf.models.hf_layout import (
    HfModelSpec,
    RopeSpec,
    ShardedParameter,
    hf_tensors_of,
    stage_parameters,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def spec_of(**changes: Any) -> HfModelSpec:
    return HfModelSpec.from_config({**LLAMA, **changes})


def parameters(spec: HfModelSpec, tensor: int, pipeline: int) -> list[list[ShardedParameter]]:
    return [
        list(stage_parameters(spec, tensor=tensor, pipeline=pipeline, stage=stage))
        for stage in range(pipeline)
    ]


def named(spec: HfModelSpec, name: str, tensor: int) -> ShardedParameter:
    return next(p for p in parameters(spec, tensor, 1)[0] if p.name == name)


def rows(parameter: ShardedParameter, rank: int) -> list[tuple[str, int, int]]:
    return [
        (piece.tensor.name.split(".")[-2], piece.start, piece.stop)
        for piece in parameter.pieces(rank)
    ]


def test_reads_both_spellings_of_the_rotary_parameters() -> None:
    version_4 = spec_of(rope_theta=500000.0, rope_scaling=LLAMA3_SCALING)
    version_5 = spec_of(rope_parameters={**LLAMA3_SCALING, "rope_theta": 500000.0})
    oldest = spec_of(rope_theta=500000.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert version_4 == version_5
    assert version_4.rope == RopeSpec(
        rope_type="llama3", theta=500000.0, factor=8.0, original_max_positions=32
    )
    assert oldest.rope.rope_type == "linear" and oldest.rope.factor == 2.0
    assert spec_of().rope == RopeSpec(rope_type="default", theta=10000.0)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    for config_class in (LlamaConfig, Qwen2Config, Qwen3Config):
        family = config_class.model_type
        ours = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
        ours["model_type"] = family
        theirs = config_class(**{k: v for k, v in ours.items() if k != "model_type"})
        spec = HfModelSpec.from_config({**ours, "num_key_value_heads": None})
        assert spec.tied_embeddings == theirs.tie_word_embeddings
        assert spec.norm_eps == theirs.rms_norm_eps
        assert spec.num_kv_heads == spec.num_heads
        assert spec.head_dim == getattr(theirs, "head_dim", 2)
        assert spec.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported, only llama"),
        ({"model_type": None}, "model_type None"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_size": "many"}, "wrong type"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"config\.json: ") as error:
        spec_of(**changes)
    assert message in str(error.value)


def test_names_what_is_missing_in_a_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json; expected a Hugging Face"):
        HfModelSpec.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        HfModelSpec.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="key 'hidden_size' is missing"):
        HfModelSpec.from_directory(tmp_path)


def test_checks_divisibility() -> None:
    smollm = spec_of(num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30)
    smollm.check_parallel(tensor=1, pipeline=2)
    smollm.check_parallel(tensor=3, pipeline=1)
    with pytest.raises(UserError, match="tensor=2: the model has 9 heads, not divisible by 2"):
        smollm.check_parallel(tensor=2, pipeline=1)
    with pytest.raises(UserError, match="pipeline=4: the model has 30 layers"):
        smollm.check_parallel(tensor=1, pipeline=4)
    grouped = spec_of(num_attention_heads=12, num_key_value_heads=2)
    grouped.check_parallel(tensor=4, pipeline=1)  # two ranks share one key/value head
    with pytest.raises(UserError, match="2 key/value heads, neither divisible by 3 nor dividing"):
        grouped.check_parallel(tensor=3, pipeline=1)
    with pytest.raises(UserError, match="MLP columns"):
        spec_of(intermediate_size=13).check_parallel(tensor=2, pipeline=1)


def test_fused_projection_is_ordered_by_key_value_head() -> None:
    # 4 query heads and 2 key/value heads of size 2: each group has 4 query rows, 2 key, 2 value.
    weight = named(spec_of(), "decoder.layers.0.self_attention.linear_qkv.weight", tensor=2)
    assert rows(weight, 0) == [("q_proj", 0, 4), ("k_proj", 0, 2), ("v_proj", 0, 2)]
    assert rows(weight, 1) == [("q_proj", 4, 8), ("k_proj", 2, 4), ("v_proj", 2, 4)]
    assert weight.shard_shape == (8, 8)


def test_fused_projection_is_cut_through_a_group_when_ranks_outnumber_key_value_heads() -> None:
    weight = named(spec_of(), "decoder.layers.0.self_attention.linear_qkv.weight", tensor=4)
    assert rows(weight, 0) == [("q_proj", 0, 4)]
    assert rows(weight, 1) == [("k_proj", 0, 2), ("v_proj", 0, 2)]


def test_gated_projection_holds_gate_then_up_on_every_rank() -> None:
    weight = named(spec_of(), "decoder.layers.0.mlp.linear_fc1.weight", tensor=2)
    assert rows(weight, 1) == [("gate_proj", 6, 12), ("up_proj", 6, 12)]
    assert weight.shard_shape == (12, 8)


def test_vocabulary_is_padded_to_equal_shards() -> None:
    weight = named(spec_of(vocab_size=5), "embedding.word_embeddings.weight", tensor=4)
    assert weight.shard_shape == (2, 8)
    assert [rows(weight, rank) for rank in range(4)] == [
        [("embed_tokens", 0, 2)],
        [("embed_tokens", 2, 4)],
        [("embed_tokens", 4, 5)],
        [],
    ]


def test_layers_are_numbered_by_stage() -> None:
    first, last = parameters(spec_of(), tensor=1, pipeline=2)
    assert first[1].name == last[0].name == "decoder.layers.0.input_layernorm.weight"
    assert last[0].sources[0].name == "model.layers.1.input_layernorm.weight"
    assert first[0].name == "embedding.word_embeddings.weight"
    assert [p.name for p in last[-2:]] == ["decoder.final_layernorm.weight", "output_layer.weight"]


def test_a_tied_output_matrix_is_loaded_on_the_last_stage_and_exported_by_the_first() -> None:
    tied = spec_of(tie_word_embeddings=True)
    (single,) = parameters(tied, tensor=1, pipeline=1)
    assert "output_layer.weight" not in {p.name for p in single}
    copy = parameters(tied, tensor=2, pipeline=2)[1][-1]
    assert copy.name == "output_layer.weight"
    assert copy.sources == ()
    assert rows(copy, 1) == [("embed_tokens", 5, 10)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 2), (3, 1)])
def test_every_element_of_the_checkpoint_is_held_exactly_once(
    family: str, tied: bool, tensor: int, pipeline: int
) -> None:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 2 if tensor != 3 else 3}
    spec = spec_of(model_type=family, tie_word_embeddings=tied, head_dim=4, **sizes)
    held: dict[str, list[tuple[int, int]]] = defaultdict(list)
    dims: dict[str, int] = {}
    for stage in parameters(spec, tensor, pipeline):
        for parameter in stage:
            for rank in range(1 if parameter.replicated else tensor):
                pieces = parameter.pieces(rank) if parameter.sources else ()
                for piece in pieces:
                    held[piece.tensor.name].append((piece.start, piece.stop))
                    dims[piece.tensor.name] = piece.dim
                filled = sum(piece.size for piece in pieces)
                assert filled <= parameter.shard_shape[parameter.dim]
    expected = {tensor_.name: tensor_.shape for tensor_ in hf_tensors_of(spec)}
    assert held.keys() == expected.keys()
    for name, shape in expected.items():
        ends = sorted(held[name])
        assert ends[0][0] == 0 and ends[-1][1] == shape[dims[name]]
        assert all(one[1] == other[0] for one, other in pairwise(ends)), name


def test_tensor_names_and_shapes_are_those_of_transformers(tiny_models: dict[str, Path]) -> None:
    from safetensors import safe_open

    for directory in tiny_models.values():
        spec = HfModelSpec.from_directory(directory)
        with safe_open(directory / "model.safetensors", framework="np") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert {t.name: t.shape for t in hf_tensors_of(spec)} == found


def test_spec_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec_of().num_heads = 3  # type: ignore[misc]
