"""The reference's log-probs: what they are, and a sweep that is stopped and gone on with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.config import LearnerConfig, ParallelConfig
from hpc_rlhf.learner.reference import ReferenceFile, sweep
from hpc_rlhf.learner.runner import Runner
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import build_model, freeze, load_hf
from hpc_rlhf.models.parallel import initialize_model_parallel
from hpc_rlhf.types import Example, FrozenRef
from tests.distributed.offline_references import pairs
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

COUNT = 130  # two blocks and a rest


class _Stop(Exception):
    pass


def _file(cache: Path, sha256: str = "m") -> ReferenceFile:
    model = FrozenRef(role="reference", name="m", sha256=sha256, path="/m")
    return ReferenceFile.of(cache, model, "data", "float32")


def test_stopped_and_gone_on_with_to_the_bit(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    directory = tiny_models["llama"]
    examples = [example for _ in range(-(-COUNT // 8)) for example in pairs()][:COUNT]

    def measure() -> tuple[Any, ...]:
        parallel = ParallelConfig(pipeline=2)
        initialize_model_parallel(parallel, seed=1, timeout_s=60)
        model = build_model(HfModelSpec.from_directory(directory), parallel, dtype=torch.float32)
        load_hf(model, directory)
        freeze(model)
        runner = Runner(model, LearnerConfig(parallel=parallel))
        control = ControlGroup(60)
        asked: list[int] = []

        def some(indices: range) -> Sequence[Example]:
            asked.append(len(indices))
            return [examples[i] for i in indices]

        def run(file: ReferenceFile, blocks: int) -> Any:
            asked.clear()

            def pause() -> None:
                if len(asked) == blocks:
                    raise _Stop

            return sweep(file, model, runner, COUNT, some, control, pause)

        whole = run(_file(tmp_path / "whole"), 100)
        stopped = _file(tmp_path / "stopped")
        with pytest.raises(_Stop):
            run(stopped, 1)
        torch.distributed.barrier()  # rank 0 has written its part
        part = stopped.read_partial()
        again = run(stopped, 100)
        return whole, part, again, list(asked)

    for whole, part, again, asked in run_ranks(measure, 2):
        assert whole.shape == (COUNT, 2)
        assert np.array_equal(part, whole[:64])
        assert np.array_equal(again, whole)
        assert asked == [64, 2]
    stopped = _file(tmp_path / "stopped")
    assert np.array_equal(stopped.read(), whole)
    assert not stopped.partial.exists()
    assert _file(tmp_path / "stopped", "another model").read() is None

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for found, example in zip(whole[:8], examples, strict=False):
        for value, s in zip(found, example.sequences, strict=True):
            ids = torch.from_numpy(s.token_ids.astype(np.int64))
            with torch.no_grad():
                table = model(ids[None]).logits[0, :-1].log_softmax(-1)
            log_probs = table.gather(1, ids[1:, None])[:, 0][torch.from_numpy(s.loss_mask[1:])]
            assert value == pytest.approx(log_probs.sum().item(), abs=1e-4)
