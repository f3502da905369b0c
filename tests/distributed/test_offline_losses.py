"""SFT, reward model and DPO: one loss and one gradient, whatever the layout, and TRL's.

The references are Hugging Face's models in fp32, one unpadded sequence at a time, under losses
written from the papers; and TRL's trainers on the same padded batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rlhf.config import LearnerConfig, OptimizerConfig, ParallelConfig
from hpc_rlhf.learner.trainer import Trainer
from hpc_rlhf.models.hf_layout import HfModelSpec
from hpc_rlhf.models.megatron import build_model, load_hf
from hpc_rlhf.models.parallel import initialize_model_parallel
from tests.distributed.learner_fixtures import keep_whole_gradients, whole_tensors
from tests.distributed.offline_references import (
    OBJECTIVES,
    PAIR_TOKENS,
    SEQUENCE_TOKENS,
    examples_of,
    gradients,
    hf_model,
    is_scored,
    plain_loss,
    relative_error,
    reward_directory,
    trl_loss,
)
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

BOUND = 1e-5
# items of a micro-batch, and the multiple that it is padded to; 1 and 16 is one padded item each
CUTS = ((2, 1), (1, 1), (8, 1), (1, 16), (2, 16))
IN_TRL = [name for name in OBJECTIVES if name not in ("sft-sequence", "dpo-conservative")]


@dataclass(frozen=True)
class Reference:
    directories: dict[bool, Path]  # by whether the model is a reward model
    losses: dict[str, float]
    gradients: dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def reference(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Tied embeddings, which a reward model does not have at its end, and q/k norms."""
    policy = tiny_models["qwen3"]
    scored = reward_directory(policy, tmp_path_factory.mktemp("reward") / "model")
    directories = {False: policy, True: scored}
    models = {kind: hf_model(path, scored=kind) for kind, path in directories.items()}
    losses, grads = {}, {}
    for name in OBJECTIVES:
        model = models[is_scored(name)]
        losses[name], grads[name] = gradients(
            lambda name=name, model=model: plain_loss(name, model), model
        )
    return Reference(directories, losses, grads)


@pytest.mark.parametrize("name", IN_TRL)
def test_the_reference_is_trls(reference: Reference, name: str, tmp_path: Path) -> None:
    loss, model = trl_loss(name, reference.directories[is_scored(name)], tmp_path)
    value, found = gradients(lambda: loss, model)
    assert value == pytest.approx(reference.losses[name], abs=BOUND)
    assert found.keys() == reference.gradients[name].keys()
    for tensor, expected in reference.gradients[name].items():
        torch.testing.assert_close(found[tensor], expected, atol=BOUND, rtol=0)


def _layouts(*layouts: tuple[int, int, int, bool]) -> list[Any]:
    return [
        pytest.param(
            ParallelConfig(tensor=tp, pipeline=pp, sequence=sp),
            dp,
            id=f"{tp}x{pp}x{dp}" + "-sequence" * sp,
        )
        for tp, pp, dp, sp in layouts
    ]


LAYOUTS = _layouts(
    (1, 1, 1, False),
    (2, 1, 1, False),
    (1, 2, 1, False),
    (1, 1, 2, False),
    (2, 1, 2, False),
    (1, 2, 2, False),
    (2, 2, 2, False),
    (2, 2, 1, True),
)
EVERY_LAYOUT = LAYOUTS + _layouts((2, 2, 1, False), (2, 1, 2, True))


@pytest.mark.parametrize(("parallel", "dp"), LAYOUTS)
def test_loss_and_gradient_do_not_depend_on_the_layout(
    reference: Reference, parallel: ParallelConfig, dp: int
) -> None:
    _compare(reference, parallel, dp, dict.fromkeys(OBJECTIVES, CUTS[:1]))


def test_nor_on_micro_batches_and_padding(reference: Reference) -> None:
    cuts = dict.fromkeys(("sft", "reward-margin-centred", "dpo"), CUTS[1:])
    _compare(reference, ParallelConfig(pipeline=2), 1, cuts)


@pytest.mark.soak
@pytest.mark.parametrize(("parallel", "dp"), EVERY_LAYOUT)
def test_nor_on_both_together(reference: Reference, parallel: ParallelConfig, dp: int) -> None:
    _compare(reference, parallel, dp, dict.fromkeys(OBJECTIVES, CUTS))


def _compare(
    reference: Reference,
    parallel: ParallelConfig,
    dp: int,
    cuts: Mapping[str, Sequence[tuple[int, int]]],
) -> None:
    def measure() -> list[tuple[str, tuple[int, int], float, float, float]]:
        return list(_measure(reference, parallel, cuts))

    for measured in run_ranks(measure, parallel.tensor * parallel.pipeline * dp):
        assert len(measured) == sum(map(len, cuts.values()))
        for name, cut, loss, swept, error in measured:
            assert loss == pytest.approx(reference.losses[name], rel=BOUND), (name, cut)
            assert swept == pytest.approx(reference.losses[name], rel=BOUND), (name, cut)
            assert error <= BOUND, (name, cut)


def _measure(
    reference: Reference, parallel: ParallelConfig, cuts: Mapping[str, Sequence[tuple[int, int]]]
) -> Iterator[tuple[str, tuple[int, int], float, float, float]]:
    """Name, cut, losses of a step and of an evaluation, and error of the gradient."""
    initialize_model_parallel(parallel, seed=1, timeout_s=60)
    multiple_of = parallel.tensor if parallel.sequence else 1
    for scored in (False, True):
        trainer = _trainer(reference.directories[scored], parallel, scored=scored)
        for name in cuts:
            if is_scored(name) is not scored:
                continue
            for items, multiple in cuts[name]:
                multiple = max(multiple, multiple_of)
                trainer.runner.pad_multiple = multiple
                trainer.runner.micro_batch_tokens = (
                    -(-items * _item_tokens(name) // multiple) * multiple
                )
                examples = examples_of(name)
                swept = trainer.evaluate(OBJECTIVES[name], examples)["loss"]
                stats = trainer.fit(OBJECTIVES[name], examples)
                found = whole_tensors(trainer.model, lambda p: p.main_grad)
                error = relative_error(found, reference.gradients[name])
                yield name, (items, multiple), stats["loss"], swept, error
        trainer.close()


def _item_tokens(name: str) -> int:
    """Positions of an item: of a policy's sequences the last token is not read."""
    if is_scored(name):
        return PAIR_TOKENS
    return SEQUENCE_TOKENS - 1 if name.startswith("sft") else PAIR_TOKENS - 2


def _trainer(directory: Path, parallel: ParallelConfig, *, scored: bool) -> Trainer:
    spec = HfModelSpec.from_directory(directory).with_heads(lm=not scored, score=scored)
    model = build_model(spec, parallel, dtype=torch.float32)
    load_hf(model, directory)
    learner = LearnerConfig(
        parallel=parallel,
        optimizer=OptimizerConfig(lr=0.0, clip_grad=0.0),
        logprob_chunk_tokens=16,
    )
    trainer = Trainer(model, learner, total_steps=100)
    keep_whole_gradients(trainer)
    return trainer
