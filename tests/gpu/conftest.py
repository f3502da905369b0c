"""One process, the only rank of a learner, for every GPU test: NCCL's groups live as long as it does."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpc_rlhf.cluster import device
from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.config import ParallelConfig
from hpc_rlhf.models.parallel import initialize_model_parallel

TIMEOUT_S = 60.0


@pytest.fixture(scope="session", autouse=True)
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlGroup]:
    """The groups of a run, in its order: NCCL's world, Megatron's, and gloo for decisions."""
    device.prepare_process(deterministic=True)  # what cuBLAS needs for it must be there first
    torch.use_deterministic_algorithms(False)
    dist.init_process_group(
        device.backend(),
        store=dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    initialize_model_parallel(ParallelConfig(), seed=1, timeout_s=TIMEOUT_S)
    yield ControlGroup(TIMEOUT_S)
    dist.destroy_process_group()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels as under ``run.deterministic``."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def medium_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve layers of 768, heads of 64, a vocabulary of 32,000: sizes at which kernels are tiled."""
    from hpc_rlhf.data.tiny import make_tiny_model

    return make_tiny_model(
        tmp_path_factory.mktemp("medium") / "model",
        family="llama",
        hidden=768,
        layers=12,
        heads=12,
        kv_heads=4,
        intermediate=2048,
        vocab_size=32000,
        vector_std=0.2,
        init_std=0.04,
    )
