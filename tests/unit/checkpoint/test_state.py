"""Random streams go on where they were, and run state comes back as it was."""

import random
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpc_rlhf.checkpoint.state import (
    capture_rng,
    read_state,
    reseed,
    restore_rank,
    restore_rng,
    write_state,
)
from tests.hdf5_holder import held_open


def _draws() -> list[Any]:
    return [
        random.gauss(0, 1),
        random.random(),
        np.random.standard_normal(),
        np.random.random(),
        torch.rand(3).tolist(),
    ]


def _seed(seed: int, *, odd_gaussians: bool) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if odd_gaussians:  # the other of the pair is cached in the state
        random.gauss(0, 1)
        np.random.standard_normal()


@pytest.mark.parametrize("odd_gaussians", [False, True])
def test_streams_go_on_through_the_file(tmp_path: Path, odd_gaussians: bool) -> None:
    states, expected = [], []
    for rank in range(3):
        _seed(rank, odd_gaussians=odd_gaussians)
        states.append(capture_rng())
        expected.append(_draws())
    run_state = {"step": 7, "cursor": {"epoch": 1, "position": 5}, "kl": 0.1, "frozen": []}
    write_state(tmp_path / "state.h5", states, run_state)
    read, found = read_state(tmp_path / "state.h5")
    assert found == run_state
    for state, draws in zip(read, expected, strict=True):
        restore_rng(state)
        assert _draws() == draws


def test_new_ranks_are_seeded_alike_at_every_load() -> None:
    _seed(0, odd_gaussians=False)
    states = [capture_rng()]
    draws = []
    for rank in (1, 2, 1, 2):
        restore_rank(states, rank)
        draws.append(_draws())
    assert draws[:2] == draws[2:]
    assert draws[0] != draws[1]
    restore_rank(states, 0)
    own = _draws()
    reseed(states[0], 0)
    assert _draws() != own


def test_datasets_are_those_documented(tmp_path: Path) -> None:
    write_state(tmp_path / "state.h5", [capture_rng(), capture_rng()], {})
    with h5py.File(tmp_path / "state.h5") as file:
        shapes = {
            name: (v.dtype.name, v.shape) for name, v in file["rng"].items() if name != "megatron"
        }
    cpu = len(torch.get_rng_state())
    assert (
        shapes.items()
        >= {
            "python": ("uint32", (2, 625)),
            "python_gauss": ("float64", (2,)),
            "numpy": ("uint32", (2, 625)),
            "numpy_gauss": ("float64", (2,)),
            "torch_cpu": ("uint8", (2, cpu)),
        }.items()
    )


def test_run_state_must_be_plain_data(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_state(tmp_path / "state.h5", [capture_rng()], {"array": np.zeros(2)})
    assert not (tmp_path / "state.h5").exists()


def test_a_lock_of_another_process_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "state.h5"
    write_state(path, [capture_rng()], {"step": 1})
    with held_open(path, "a"):
        assert read_state(path)[1] == {"step": 1}
        write_state(path, [capture_rng()], {"step": 2})
        assert read_state(path)[1] == {"step": 2}
