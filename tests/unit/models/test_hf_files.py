import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpc_rlhf.errors import UserError
from hpc_rlhf.models.hf_files import (
    INDEX_FILE,
    SINGLE_FILE,
    HfWeights,
    plan_files,
    publish_export,
    write_companions,
)
from hpc_rlhf.models.hf_layout import HfModelSpec, HfTensor, Piece


@pytest.fixture
def model(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return shutil.copytree(tiny_models["qwen2-tied"], tmp_path / "model")


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    weights: dict[str, Any] = {**load_file(directory / SINGLE_FILE), **changes}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, directory / SINGLE_FILE)


def check(directory: Path) -> None:
    with HfWeights(directory) as weights:
        weights.check(HfModelSpec.from_directory(directory))


def test_reads_slices(model: Path) -> None:
    whole = load_file(model / SINGLE_FILE)["model.layers.1.mlp.down_proj.weight"]
    source = HfTensor("model.layers.1.mlp.down_proj.weight", tuple(whole.shape))
    with HfWeights(model) as weights:
        assert torch.equal(weights.read(Piece(source, 0, 3, 7)), whole[3:7])
        assert torch.equal(weights.read(Piece(source, 1, 3, 7)), whole[:, 3:7])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_named(
    value: float, dtype: torch.dtype, model: Path
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    weight = load_file(model / SINGLE_FILE)[name].to(dtype)
    weight[5, 1] = value
    rewrite(model, **{name: weight})
    source = HfTensor(name, tuple(weight.shape))
    with HfWeights(model) as weights:
        assert torch.equal(weights.read(Piece(source, 0, 0, 5)), weight[:5])
        count = 3 * weight.shape[1]
        with pytest.raises(UserError, match=rf"{name}: 1 of {count} values are NaN or infinite"):
            weights.read(Piece(source, 0, 4, 7))


def test_accepts_a_superfluous_tied_head_and_old_rotary_buffers(model: Path) -> None:
    rewrite(
        model,
        **{
            "lm_head.weight": torch.zeros(1),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1),
        },
    )
    check(model)


def test_names_missing_tensors(model: Path) -> None:
    rewrite(model, **{"model.norm.weight": None})
    with pytest.raises(UserError, match=r"tensors are missing: model\.norm\.weight"):
        check(model)


def test_names_unknown_tensors(model: Path) -> None:
    rewrite(model, **{"model.layers.0.mlp.gate_proj.bias": torch.zeros(1)})
    with pytest.raises(UserError, match=r"does not have: model\.layers\.0\.mlp\.gate_proj\.bias"):
        check(model)


def test_names_tensors_of_another_shape(model: Path) -> None:
    rewrite(model, **{"model.norm.weight": torch.zeros(3)})
    with pytest.raises(
        UserError, match=r"norm\.weight has shape \(3,\), config\.json says \(64,\)"
    ):
        check(model)


def test_names_a_directory_without_weights_and_a_broken_file(model: Path) -> None:
    (model / SINGLE_FILE).write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        check(model)
    (model / SINGLE_FILE).unlink()
    with pytest.raises(UserError, match=rf"neither {SINGLE_FILE} nor {INDEX_FILE} is there"):
        check(model)


def spec() -> HfModelSpec:
    return HfModelSpec.from_config(
        {
            "model_type": "llama",
            "hidden_size": 4,
            "intermediate_size": 4,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "vocab_size": 4,
            "max_position_embeddings": 8,
        }
    )


def test_one_stage_that_fits_is_one_file() -> None:
    ((file,),) = plan_files(spec(), pipeline=1, itemsize=4, max_file_bytes=10_000)
    assert file.name == SINGLE_FILE
    assert len(file.tensors) == 1 + 2 * 9 + 2


def test_files_are_closed_before_they_grow_too_large() -> None:
    # Matrices of 64 bytes, norms of 16. Stage 0 is the embedding and one layer, 64 + 480 bytes.
    first, last = plan_files(spec(), pipeline=2, itemsize=4, max_file_bytes=300)
    sizes = [
        [sum(4 * torch.Size(t.shape).numel() for t in file.tensors) for file in stage]
        for stage in (first, last)
    ]
    assert sizes == [[64 + 16 + 3 * 64, 64 + 16 + 3 * 64], [16 + 4 * 64 + 16, 3 * 64 + 16 + 64]]
    assert [file.name for file in (*first, *last)] == [
        f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)
    ]


def test_companions_are_copied_and_the_dtype_is_updated(model: Path, tmp_path: Path) -> None:
    (model / "README.md").write_text("about other weights")
    (model / INDEX_FILE).write_text("{}")
    target = tmp_path / "export"
    target.mkdir()
    write_companions(target, model, plan_files(spec(), 2, 2, 10_000), torch.bfloat16, {})
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (target / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert not (target / "README.md").exists()
    index = json.loads((target / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 2 * (2 * 16 + 2 * (7 * 16 + 2 * 4) + 4)
    assert index["weight_map"]["lm_head.weight"] == "model-00002-of-00002.safetensors"


def test_an_existing_export_is_kept_if_equal_and_refused_if_not(tmp_path: Path) -> None:
    target = tmp_path / "policy"

    def staging(name: str, config: str) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(config)
        return directory

    publish_export(staging("first", "{}"), target)
    inode = target.stat().st_ino
    publish_export(staging("same", "{}"), target)
    with pytest.raises(UserError, match="exists and is different"):
        publish_export(staging("other", "[]"), target)
    more = staging("more", "{}")
    (more / "tokenizer.json").touch()
    with pytest.raises(UserError, match="exists and is different"):
        publish_export(more, target)
    assert target.stat().st_ino == inode
    assert (target / "config.json").read_text() == "{}"
