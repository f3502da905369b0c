"""The model beyond the correctness table: loading, gathering, bf16, export, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpc_rlhf.config import ParallelConfig
from hpc_rlhf.errors import ComponentError, UserError
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import (
    PolicyModel,
    build_model,
    export_hf,
    freeze,
    hf_metadata,
    hf_tensors,
    load_hf,
)
from hpc_rlhf.models.parallel import initialize_model_parallel
from tests.distributed.correctness import full_logits
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

TWO_BY_TWO = ParallelConfig(tensor=2, pipeline=2)


def loaded(
    directory: Path, parallel: ParallelConfig, dtype: torch.dtype = torch.float32
) -> PolicyModel:
    model = build_model(HfModelSpec.from_directory(directory), parallel, dtype=dtype)
    load_hf(model, directory)
    return model


def packed(*lengths: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, position ids and cumulative lengths of random sequences."""
    tokens = torch.randint(1, 200, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return tokens, positions, torch.tensor([0, *lengths]).cumsum(0).int()


def in_world(parallel: ParallelConfig, check: Callable[..., Any], *args: Any) -> Any:
    initialize_model_parallel(parallel, seed=0, timeout_s=60)
    return check(*args)


def check_gathering(directories: dict[str, Path]) -> set[str]:
    names: set[str] = set()
    for directory in directories.values():
        model = loaded(directory, TWO_BY_TWO)
        original = load_file(directory / "model.safetensors")
        gathered = list(hf_tensors(model))
        for name, tensor in gathered:
            assert torch.equal(tensor, original[name]), name
        described = [(meta.name, meta.dtype, meta.shape) for meta in hf_metadata(model)]
        assert described == [(n, t.dtype, tuple(t.shape)) for n, t in gathered]
        names |= {f"{directory.name}:{name}" for name, _ in gathered}
    return names


def test_gathered_weights_equal_the_files_to_the_bit(tiny_models: dict[str, Path]) -> None:
    per_rank = run_ranks(in_world, 4, TWO_BY_TWO, check_gathering, tiny_models)
    assert per_rank[0] == per_rank[1] and per_rank[2] == per_rank[3]  # the ranks of one stage
    assert per_rank[0].isdisjoint(per_rank[2])
    assert per_rank[0] | per_rank[2] == {
        f"{name}:{tensor}"
        for name, directory in tiny_models.items()
        for tensor in load_file(directory / "model.safetensors")
    }


def check_export(directories: dict[str, Path], root: Path) -> None:
    for name, directory in directories.items():
        model = loaded(directory, TWO_BY_TWO)
        export_hf(model, directory, root / name, max_file_bytes=100_000)
        assert (root / name / "config.json").exists()  # for every rank, when it returns
        export_hf(model, directory, root / name, max_file_bytes=100_000)  # the same again: kept
        export_hf(model, directory, root / f"{name}-bf16", dtype=torch.bfloat16)
    with pytest.raises(UserError, match="exists and is different"):
        export_hf(model, directory, root / name)
    (root / "file").touch()
    with pytest.raises(ComponentError, match=r"learner rank 0 could not prepare .*/file/policy"):
        export_hf(model, directory, root / "file" / "policy")


def test_export_is_read_by_hugging_face(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(in_world, 8, TWO_BY_TWO, check_export, tiny_models, tmp_path)
    tokens = torch.arange(1, 30)[None]
    for name, directory in tiny_models.items():
        exported = tmp_path / name
        model, info = AutoModelForCausalLM.from_pretrained(
            exported, dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        original = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        assert torch.equal(model(tokens).logits, original(tokens).logits)
        assert AutoTokenizer.from_pretrained(exported)("hi").input_ids

        index = json.loads((exported / "model.safetensors.index.json").read_text())
        files = set(index["weight_map"].values())
        assert len(files) > 2 and files == {p.name for p in exported.glob("*.safetensors")}
        half = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-bf16")
        assert half.dtype == torch.bfloat16
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def bf16_logits(directories: dict[str, Path]) -> dict[str, torch.Tensor]:
    tokens, positions, bounds = packed(40, 13)
    logits = {}
    for name, directory in directories.items():
        model = freeze(loaded(directory, ParallelConfig(), torch.bfloat16))
        logits[name] = full_logits(model, model(tokens, positions, bounds)).float()
    return logits


def test_bf16_is_as_close_to_float32_as_hugging_face_in_bf16(tiny_models: dict[str, Path]) -> None:
    (ours,) = run_ranks(in_world, 1, ParallelConfig(), bf16_logits, tiny_models)
    tokens, _, _ = packed(40, 13)
    for name, directory in tiny_models.items():
        theirs = {}
        for dtype in (torch.float32, torch.bfloat16):
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
            with torch.no_grad():
                parts = [model(part[None]).logits[0].float() for part in tokens.split([40, 13])]
            theirs[dtype] = torch.cat(parts)

        def rms(difference: torch.Tensor) -> float:
            return difference.square().mean().sqrt().item()

        rounding = rms(theirs[torch.bfloat16] - theirs[torch.float32])
        assert 0 < rms(ours[name] - theirs[torch.float32]) < 1.2 * rounding, name


def check_positions(directory: Path, parallel: ParallelConfig) -> None:
    model = loaded(directory, parallel)
    tokens, positions, bounds = packed(9, 7)
    wanted = torch.tensor([3, 4, 11])
    results = []
    for select in (None, wanted):
        hidden = model(tokens, positions, bounds)
        targets = tokens if select is None else tokens[select]
        log_probs, entropy = model.log_probs(
            hidden, targets, temperature=0.9, chunk_tokens=4, positions=select
        )
        if select is None:
            log_probs, entropy = log_probs[wanted], entropy[wanted]
        model.zero_grad()
        (log_probs.sum() + entropy.sum()).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        results.append([log_probs, entropy, *gradients])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("sequence", [False, True])
def test_selected_positions_equal_a_selection_of_all(
    tiny_models: dict[str, Path], sequence: bool
) -> None:
    parallel = ParallelConfig(tensor=2, sequence=sequence)
    run_ranks(in_world, 2, parallel, check_positions, tiny_models["qwen3"], parallel)


def check_frozen(directory: Path) -> None:
    model = freeze(loaded(directory, ParallelConfig()))
    assert not model(*packed(5)).requires_grad
    assert not any(p.requires_grad for p in model.parameters())


def test_a_frozen_model_records_no_graph(tiny_models: dict[str, Path]) -> None:
    run_ranks(in_world, 1, ParallelConfig(), check_frozen, tiny_models["llama"])


def check_refusals(directory: Path, parallel: ParallelConfig) -> None:
    model = loaded(directory, parallel)
    tokens, positions, bounds = packed(4, 3)
    with pytest.raises(ValueError, match=r"7 packed tokens are not a multiple of .* size 2"):
        model(tokens, positions, bounds)
    with pytest.raises(ValueError, match="cu_seqlens covers 4 tokens of 6"):
        model(tokens[:6], positions[:6], bounds[:2])
    with pytest.raises(UserError, match="the model has 4 layers, not divisible by 3"):
        build_model(model.spec, ParallelConfig(tensor=2, pipeline=3), dtype=torch.float32)


def test_refuses_batches_and_layouts_that_do_not_fit(tiny_models: dict[str, Path]) -> None:
    parallel = ParallelConfig(tensor=2, sequence=True)
    run_ranks(in_world, 2, parallel, check_refusals, tiny_models["llama"], parallel)


def check_world_size() -> None:
    with pytest.raises(UserError, match=r"3 learner ranks are not divisible .* = 2 x 1"):
        initialize_model_parallel(ParallelConfig(tensor=2), seed=0, timeout_s=60)


def test_refuses_a_world_that_does_not_divide() -> None:
    run_ranks(check_world_size, 3)


def check_tensor_parallel_marks(directory: Path) -> None:
    """Megatron counts a parameter without the mark on tensor-parallel rank 0 only."""
    model = loaded(directory, ParallelConfig(tensor=2))
    for parameter in model.layout():
        built = model.get_parameter(parameter.name)
        assert getattr(built, "tensor_model_parallel", False) != parameter.replicated, parameter


def test_sharded_parameters_are_marked_for_gradient_norms(tiny_models: dict[str, Path]) -> None:
    parallel = ParallelConfig(tensor=2)
    run_ranks(in_world, 2, parallel, check_tensor_parallel_marks, tiny_models["qwen2-untied"])
