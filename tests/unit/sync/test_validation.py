"""Announced tensors against the checkpoint of the server."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hpc_rlhf.sync.validation import check_tensors, checkpoint_shapes

EXPECTED = {"embed": (8, 4), "norm": (4,), "lm_head.weight": (8, 4)}


def without(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in EXPECTED.items() if name not in names}


def test_shapes_come_from_all_files(tmp_path: Path) -> None:
    save_file(
        {"embed": torch.zeros(8, 4), "norm": torch.zeros(4)}, tmp_path / "model-1.safetensors"
    )
    save_file({"lm_head.weight": torch.zeros(8, 4)}, tmp_path / "model-2.safetensors")
    assert checkpoint_shapes(tmp_path) == EXPECTED


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        checkpoint_shapes(tmp_path)


def test_the_same_tensors_pass() -> None:
    check_tensors(EXPECTED, EXPECTED, tied=False)


@pytest.mark.parametrize(
    ("announced", "message"),
    [
        (without("norm"), r"1 tensors of the checkpoint are not announced \['norm'\]"),
        (without("lm_head.weight"), "not announced"),
        (EXPECTED | {"extra": (1,)}, r"1 announced ones are not in it \['extra'\]"),
        (EXPECTED | {"embed": (4, 8)}, "embed: announced as"),
        ({}, "3 tensors of the checkpoint are not announced"),
    ],
)
def test_others_do_not(announced: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tensors(announced, EXPECTED, tied=False)


@pytest.mark.parametrize("announced", [EXPECTED, without("lm_head.weight")])
@pytest.mark.parametrize("expected", [EXPECTED, without("lm_head.weight")])
def test_a_tied_output_layer_may_be_absent(
    announced: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    check_tensors(announced, expected, tied=True)


def test_a_tied_output_layer_has_its_shape() -> None:
    with pytest.raises(ValueError, match="lm_head"):
        check_tensors(EXPECTED | {"lm_head.weight": (9, 4)}, EXPECTED, tied=True)


def test_computed_tensors_of_old_checkpoints_are_not_expected() -> None:
    expected = EXPECTED | {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    check_tensors(EXPECTED, expected, tied=False)
