"""PPO with a critic on the policy's trunk, and with one of its own.

The reference is plain torch on Hugging Face's model in fp32, one unpadded sequence at a time: token
rewards, advantages, whitening and both losses are written from the papers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rlhf.checkpoint.manager import CheckpointManager
from hpc_rlhf.checkpoint.save_point import SavePoint
from hpc_rlhf.config import (
    AlgorithmConfig,
    AlgorithmName,
    CriticConfig,
    CriticKind,
    KlConfig,
    KlEstimator,
    KlPlacement,
    LossMean,
    OptimizerConfig,
    ParallelConfig,
)
from hpc_rlhf.learner.actor_critic import ActorCritic, UnfinishedUpdate, UpdateStopped
from hpc_rlhf.learner.algorithms import Algorithm, make_algorithm
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Experience
from tests.distributed.learner_fixtures import (
    CLIP,
    MAX_NEW_TOKENS,
    bits_of,
    experience,
    hf_log_probs,
    hf_model,
    keep_whole_gradients,
    make_trainer,
    score_weight,
    whole_tensors,
)
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

KL, GAMMA, LAM, COEF, VALUE_CLIP = 0.05, 0.95, 0.9, 0.3, 0.2
NO_STEP = OptimizerConfig(lr=0.0, clip_grad=0.0)
ADAM = OptimizerConfig(lr=1e-3, eps=1e-5)
# tokens of a micro-batch, and the multiple it is padded to: one sequence each, some, all, one padded
SOAK = pytest.mark.soak
CUTS = ((20, 1), (48, 1), (4096, 1), (32, 32))


def _algorithm(kind: CriticKind, **options: Any) -> Algorithm:
    return make_algorithm(
        AlgorithmConfig(
            name=AlgorithmName.PPO,
            clip_low=CLIP[0],
            clip_high=CLIP[1],
            loss_mean=LossMean.TOKEN,
            gamma=GAMMA,
            lam=LAM,
            kl=KlConfig(coef=KL, placement=KlPlacement.REWARD, estimator=KlEstimator.K1),
            **options,
        ),
        CriticConfig(kind=kind, coef=COEF, clip=VALUE_CLIP),
    )


def _learner(
    directory: Path,
    parallel: ParallelConfig,
    kind: CriticKind,
    adam: OptimizerConfig,
    *,
    of_critic: ParallelConfig | None = None,
    **options: Any,
) -> ActorCritic:
    """Args:
    of_critic: the layout of a critic of its own; default: the policy's.
    """
    shared = kind is CriticKind.SHARED
    options |= {"optimizer": adam}
    policy = make_trainer(directory, parallel, score=shared, **options)
    critic = None
    if not shared:
        critic = make_trainer(
            directory, of_critic or parallel, lm=False, score=True, name="critic", **options
        )
    return ActorCritic(policy, critic, max_new_tokens=MAX_NEW_TOKENS)


# -- one gradient, whatever the layout ---------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    directory: Path
    experience: Experience
    values: list[torch.Tensor]  # of the critic, either kind: the trunks are the same
    losses: dict[str, float]
    gradients: dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def reference(tiny_models: dict[str, Path]) -> Reference:
    directory = tiny_models["qwen3"]
    model = hf_model(directory)
    head = score_weight(model.config.hidden_size).requires_grad_()
    batch = experience(directory)
    rng = np.random.default_rng(9)
    with torch.no_grad():
        values = [_values(model, head, r) for r in batch.rollouts]
    old = tuple((v.numpy() + 0.3 * rng.standard_normal(len(v))).astype(np.float32) for v in values)
    batch = replace(batch, values=old)
    policy_loss, value_loss = _losses(model, head, batch)
    losses = {
        "policy": policy_loss,
        "critic": value_loss,
        "shared": policy_loss + COEF * value_loss,
    }
    gradients = {}
    for name, loss in losses.items():
        model.zero_grad()
        head.grad = None
        loss.backward(retain_graph=True)
        gradients[name] = {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        if head.grad is not None:
            gradients[name]["score.weight"] = head.grad.clone()
    return Reference(
        directory=directory,
        experience=batch,
        values=values,
        losses={name: loss.item() for name, loss in losses.items()},
        gradients=gradients,
    )


def _values(model: Any, head: torch.Tensor, rollout: Any) -> torch.Tensor:
    """Values of the states that the completion's tokens were sampled in, [T]."""
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
    hidden = model.model(ids[None]).last_hidden_state[0]
    return (hidden @ head[0])[len(rollout.prompt.token_ids) - 1 : -1]


def _losses(model: Any, head: torch.Tensor, batch: Experience) -> tuple[torch.Tensor, torch.Tensor]:
    assert batch.ref_logprobs is not None
    assert batch.values is not None
    advantages, returns = [], []
    for i in range(len(batch.rollouts)):
        rewards = [-KL * float(o - r) for o, r in zip(batch.old_logprobs[i], batch.ref_logprobs[i])]
        rewards[-1] += float(batch.rewards[i])
        v = [*map(float, batch.values[i]), 0.0]
        deltas = [r + GAMMA * v[t + 1] - v[t] for t, r in enumerate(rewards)]
        mine = [
            sum((GAMMA * LAM) ** (s - t) * deltas[s] for s in range(t, len(deltas)))
            for t in range(len(deltas))
        ]
        advantages.append(torch.tensor(mine, dtype=torch.float64))
        returns.append(advantages[-1] + torch.tensor(v[:-1], dtype=torch.float64))
    every = torch.cat(advantages)
    policy, critic = [], []
    for i, rollout in enumerate(batch.rollouts):
        a = ((advantages[i] - every.mean()) / every.std(correction=0)).float()
        ratio = (hf_log_probs(model, rollout)[0] - torch.from_numpy(batch.old_logprobs[i])).exp()
        clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
        policy.append(-torch.minimum(ratio * a, clipped * a))
        values, old = _values(model, head, rollout), torch.from_numpy(batch.values[i])
        near = torch.clamp(values, old - VALUE_CLIP, old + VALUE_CLIP)
        errors = torch.stack([(v - returns[i].float()) ** 2 for v in (values, near)])
        critic.append(0.5 * errors.amax(0))
    return torch.cat(policy).mean(), torch.cat(critic).mean()


def _layout(tp: int, pp: int, dp: int, *, sp: bool = False, marks: Any = ()) -> Any:
    name = f"{tp}x{pp}x{dp}{'-sequence' if sp else ''}"
    parallel = ParallelConfig(tensor=tp, pipeline=pp, sequence=sp)
    return pytest.param(parallel, dp, id=name, marks=marks)


LAYOUTS = [
    _layout(1, 1, 1),
    _layout(2, 1, 1),
    _layout(1, 2, 1),
    _layout(1, 1, 2),
    _layout(2, 2, 2, sp=True),
    _layout(2, 2, 1, marks=pytest.mark.soak),
    _layout(2, 1, 2, marks=pytest.mark.soak),
    _layout(1, 2, 2, marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("parallel", "dp"), LAYOUTS)
def test_gradient_does_not_depend_on_the_layout(
    reference: Reference, parallel: ParallelConfig, dp: int
) -> None:
    def measure() -> list[Any]:
        return list(_measure(reference, parallel))

    ranks = run_ranks(measure, parallel.tensor * parallel.pipeline * dp)
    for rank, measured in enumerate(ranks):
        for case, loss, error in measured:
            assert error <= 1e-5, (rank, case)
            assert loss == pytest.approx(reference.losses[case], rel=1e-5, abs=1e-6), case
    with_head = {case for measured in ranks for case, _, _ in measured}
    assert with_head == set(reference.losses)


@pytest.mark.parametrize(
    ("parallel", "of_critic"),
    [
        (ParallelConfig(tensor=2), ParallelConfig()),
        (ParallelConfig(), ParallelConfig(pipeline=2)),
        pytest.param(
            ParallelConfig(pipeline=2), ParallelConfig(tensor=2, sequence=True), marks=SOAK
        ),
    ],
    ids=["tensor-data", "data-pipeline", "pipeline-sequence"],
)
def test_critic_in_a_layout_of_its_own(
    reference: Reference, parallel: ParallelConfig, of_critic: ParallelConfig
) -> None:
    """Over the same two ranks."""

    def measure() -> list[Any]:
        return list(_measure(reference, parallel, of_critic, kinds=[CriticKind.SEPARATE]))

    ranks = run_ranks(measure, 2)
    for rank, measured in enumerate(ranks):
        for case, loss, error in measured:
            assert error <= 1e-5, (rank, case)
            assert loss == pytest.approx(reference.losses[case], rel=1e-5, abs=1e-6), case
    assert {case for measured in ranks for case, _, _ in measured} == {"policy", "critic"}


def _measure(
    reference: Reference,
    parallel: ParallelConfig,
    of_critic: ParallelConfig | None = None,
    kinds: Sequence[CriticKind] = tuple(CriticKind),
) -> Iterator[tuple[str, float, float]]:
    for kind in kinds:
        learner = _learner(reference.directory, parallel, kind, NO_STEP, of_critic=of_critic)
        readings = learner.read(reference.experience.rollouts, None)
        assert readings.values is not None
        for found, expected in zip(readings.values, reference.values, strict=True):
            torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=0)
        trainers = [t for t in (learner.policy, learner.critic) if t is not None]
        for trainer in trainers:
            keep_whole_gradients(trainer)
        for tokens, multiple in CUTS:
            for trainer in trainers:
                trainer.runner.micro_batch_tokens = tokens
                trainer.runner.pad_multiple = max(multiple, trainer.runner.pad_multiple)
            stats = learner.update(_algorithm(kind), reference.experience)
            if kind is CriticKind.SHARED:
                yield _compare(reference, "shared", stats["loss"], learner.policy)
                continue
            assert learner.critic is not None
            yield _compare(reference, "policy", stats["loss"], learner.policy)
            yield _compare(reference, "critic", stats["critic/loss"], learner.critic)


def _compare(
    reference: Reference, case: str, loss: float, trainer: Any
) -> tuple[str, float, float]:
    found = whole_tensors(trainer.model, lambda p: p.main_grad)
    expected = reference.gradients[case]
    errors = [((found[n] - expected[n]).norm() / expected[n].norm()).item() for n in found]
    return case, loss, max(errors)


# -- learning and resuming ---------------------------------------------------------------------------


def _scored(learner: ActorCritic, batch: Experience) -> Experience:
    """The rollouts of ``batch`` as the learner reads them now."""
    readings = learner.read(batch.rollouts, None)
    return replace(batch, old_logprobs=readings.old, values=readings.values)


@pytest.mark.parametrize(
    ("kind", "parallel", "of_critic"),
    [
        (CriticKind.SHARED, ParallelConfig(tensor=2), None),
        (CriticKind.SEPARATE, ParallelConfig(pipeline=2), ParallelConfig(tensor=2)),
        pytest.param(CriticKind.SHARED, ParallelConfig(pipeline=2), None, marks=SOAK),
        pytest.param(CriticKind.SEPARATE, ParallelConfig(tensor=2), None, marks=SOAK),
        pytest.param(
            CriticKind.SEPARATE, ParallelConfig(tensor=2), ParallelConfig(tensor=1), marks=SOAK
        ),
    ],
)
def test_resuming_is_bitwise_exact(
    tiny_models: dict[str, Path],
    tmp_path: Path,
    kind: CriticKind,
    parallel: ParallelConfig,
    of_critic: ParallelConfig | None,
) -> None:
    """Saved behind the critic's first steps, and within an update; both go on as if nothing was."""
    directory = tiny_models["llama"]
    batch = experience(directory)
    algorithm = _algorithm(kind, epochs=2, mini_batches=2)
    world = parallel.tensor * parallel.pipeline

    def uninterrupted() -> Any:
        learner = _learner(directory, parallel, kind, ADAM, of_critic=of_critic)
        before = whole_tensors(learner.model)
        warm = learner.update(algorithm, _scored(learner, batch), critic_only=True)
        after = whole_tensors(learner.model)
        trunk_stays = all(torch.equal(after[n], before[n]) for n in before if n != "score.weight")
        manager = CheckpointManager(RunDir(tmp_path), keep=0)
        manager.save(SavePoint(1), learner, {})
        scored = _scored(learner, batch)
        return warm, trunk_stays, learner.update(algorithm, scored), bits_of(learner)

    def resumed_and_stopped() -> Any:
        learner = _learner(directory, parallel, kind, ADAM, of_critic=of_critic)
        manager = CheckpointManager(RunDir(tmp_path), keep=0)
        manager.load(SavePoint(1), learner)
        scored = _scored(learner, batch)
        asked = iter(range(9))
        with pytest.raises(UpdateStopped) as raised:
            learner.update(algorithm, scored, stop=lambda: next(asked) == 1)
        manager.save(SavePoint(1, 2), learner, {"update": raised.value.unfinished.to_json()})
        return scored

    def resumed_again() -> Any:
        learner = _learner(directory, parallel, kind, ADAM, of_critic=of_critic)
        state = CheckpointManager(RunDir(tmp_path), keep=0).load(SavePoint(1, 2), learner)
        unfinished = UnfinishedUpdate.from_json(state["update"])
        return learner.update(algorithm, scored, unfinished=unfinished), bits_of(learner)

    expected = run_ranks(uninterrupted, world)
    (scored, *_) = run_ranks(resumed_and_stopped, world)
    for (warm, trunk_stays, stats, bits), found in zip(
        expected, run_ranks(resumed_again, world), strict=True
    ):
        assert found == (stats, bits)
        assert trunk_stays, "a critic's first steps change the policy"
        assert warm["value_loss"] > stats["value_loss"]
        assert "policy_loss" not in warm
        assert ("critic/lr" in stats) == (kind is CriticKind.SEPARATE)


def test_layouts_of_policy_and_critic_may_change_on_resume(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Weights to the bit, and the losses of the update that follows, as the first layouts have them."""
    directory = tiny_models["llama"]
    batch = experience(directory)
    algorithm = _algorithm(CriticKind.SEPARATE)
    one, other = ParallelConfig(tensor=2), ParallelConfig(pipeline=2)

    def whole(learner: ActorCritic) -> dict[str, torch.Tensor]:
        assert learner.critic is not None
        mine = {
            f"{name}/{n}": tensor
            for name, trainer in (("policy", learner.policy), ("critic", learner.critic))
            for n, tensor in whole_tensors(trainer.model).items()
        }
        every: list[Any] = [None, None]
        torch.distributed.all_gather_object(every, mine)
        return every[0] | every[1]

    def saved() -> Any:
        learner = _learner(directory, one, CriticKind.SEPARATE, ADAM, of_critic=other)
        learner.update(algorithm, _scored(learner, batch))
        CheckpointManager(RunDir(tmp_path), keep=0).save(SavePoint(1), learner, {})
        weights = whole(learner)
        return weights, learner.update(algorithm, _scored(learner, batch))

    def loaded() -> Any:
        learner = _learner(directory, other, CriticKind.SEPARATE, ADAM, of_critic=one)
        CheckpointManager(RunDir(tmp_path), keep=0).load(SavePoint(1), learner)
        weights = whole(learner)
        return weights, learner.update(algorithm, _scored(learner, batch))

    expected, stats = run_ranks(saved, 2)[0]
    found, stats_found = run_ranks(loaded, 2)[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name in ("loss", "grad_norm", "critic/loss", "critic/grad_norm"):
        assert stats_found[name] == pytest.approx(stats[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("kind", list(CriticKind))
def test_the_critic_learns_to_predict_returns(
    tiny_models: dict[str, Path], kind: CriticKind
) -> None:
    directory = tiny_models["llama"]
    batch = experience(directory)

    def learn() -> list[float]:
        learner = _learner(directory, ParallelConfig(), kind, replace(ADAM, lr=3e-3))
        algorithm = _algorithm(kind, epochs=4)
        return [
            learner.update(algorithm, _scored(learner, batch))["explained_variance"]
            for _ in range(8)
        ]

    ((first, *_, last),) = run_ranks(learn, 1)
    assert first < 0.1
    assert last > 0.3


def test_what_a_critic_of_its_own_costs(tiny_models: dict[str, Path]) -> None:
    """16 bytes a parameter in mixed precision; a value head on the trunk next to nothing.

    bfloat16 weights, float32 gradients, master weights and two moments, the last three sharded over
    two data-parallel ranks.
    """

    def measure() -> list[dict[str, int]]:
        found = []
        for kind in CriticKind:
            learner = _learner(
                tiny_models["llama"], ParallelConfig(), kind, ADAM, dtype=torch.bfloat16
            )
            trainers = [t for t in (learner.policy, learner.critic) if t is not None]
            uses = [trainer.memory() for trainer in trainers]
            numbers = [sum(p.numel() for p in t.model.parameters()) for t in trainers]
            found.append(
                {
                    "parameters": sum(numbers),
                    "weights": sum(use.parameters for use in uses),
                    "gradients": sum(use.gradients for use in uses),
                    "optimizer": sum(use.optimizer for use in uses),
                }
            )
        return found

    for shared, separate in run_ranks(measure, 2):
        for use in (shared, separate):
            n = use["parameters"]
            assert use["weights"] == pytest.approx(2 * n, rel=0.02)  # buffers are padded
            assert use["gradients"] == pytest.approx(4 * n, rel=0.02)
            assert use["optimizer"] == pytest.approx(12 * n / 2, rel=0.02)
        assert separate["parameters"] > 1.6 * shared["parameters"]
