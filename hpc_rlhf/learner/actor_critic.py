"""What the online stage trains: a policy, and the critic of an algorithm that has one."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_rlhf.config import LossMean
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.learner.algorithms import Algorithm, Lesson
from hpc_rlhf.learner.losses import sequence_weights
from hpc_rlhf.learner.packing import WEIGHT, PackItem, completion_item
from hpc_rlhf.learner.stats import StepStats, merge
from hpc_rlhf.learner.trainer import NotFinite, Trainer
from hpc_rlhf.models.megatron import PolicyModel
from hpc_rlhf.types import Experience, Readings, Rollout

logger = logging.getLogger(__name__)

# Of a critic with an optimizer of its own; what its loss reports has names of its own.
_CRITICS_OWN = ("loss", "grad_norm", "lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedUpdate:
    """An update that was stopped between two mini-batches: what is known of the first ones."""

    first_step: int  # mini-batches before it: what the order of its samples is drawn from
    mini_batches: int  # done, of :func:`mini_batch_plan`
    steps: tuple[StepStats, ...]  # of the policy
    critic_steps: tuple[StepStats, ...] = ()
    not_finite: int = 0  # skipped mini-batches

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "UnfinishedUpdate":
        lists = {
            name: tuple(StepStats(**step) for step in value[name])
            for name in ("steps", "critic_steps")
        }
        return cls(**{**value, **lists})


class UpdateStopped(Exception):
    """An update was left between two mini-batches; the weights are those after ``unfinished``."""

    def __init__(self, unfinished: UnfinishedUpdate) -> None:
        super().__init__(f"stopped after {unfinished.mini_batches} mini-batches")
        self.unfinished = unfinished


def _never() -> bool:
    return False


class ActorCritic:
    """A policy and its critic, learned from the same mini-batches of the same experience.

    The critic is a head on the policy's trunk, and then part of the policy's model and loss, or a
    model with an optimizer of its own, or not there. Every method is collective over the learner.
    """

    def __init__(
        self,
        policy: Trainer,
        critic: Trainer | None = None,
        *,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        """Args:
        critic: of its own; None where there is none or it is on the policy's trunk.
        max_new_tokens: the sampler's; ``LossMean.CONSTANT`` divides by it and needs it.
        seed: of the order of samples in mini-batches.
        """
        self.policy = policy
        self.critic = critic
        self._max_new_tokens = max_new_tokens
        self._seed = seed

    @property
    def model(self) -> PolicyModel:
        """The policy's model, which is sampled from."""
        return self.policy.model

    @property
    def num_steps(self) -> int:
        """Mini-batches learned from; a critic of its own learns from every one."""
        return (self.critic or self.policy).num_steps

    def memory(self) -> dict[str, float]:
        """Bytes that this rank holds of policy and critic, as metrics."""
        found = self.policy.memory().as_metrics("policy")
        return found | (self.critic.memory().as_metrics("critic") if self.critic else {})

    def read(self, rollouts: Sequence[Rollout], reference: PolicyModel | None) -> Readings:
        """Sweep the rollouts with the policy, the reference and the critic.

        Args:
            rollouts: the same on every rank.

        Returns:
            The same on every rank.
        """
        policy = self.policy.read(rollouts)
        assert policy.log_probs is not None
        values = policy.scores if self.critic is None else self.critic.read(rollouts).scores
        base = None if reference is None else self.policy.read(rollouts, reference).log_probs
        return Readings(old=policy.log_probs, reference=base, values=values)

    def update(
        self,
        algorithm: Algorithm,
        experience: Experience,
        *,
        critic_only: bool = False,
        unfinished: UnfinishedUpdate | None = None,
        stop: Callable[[], bool] = _never,
        max_not_finite: int = 0,
    ) -> dict[str, float]:
        """Learn from one batch of rollouts: ``epochs`` x ``mini_batches`` optimizer steps.

        Args:
            experience: the same on every rank.
            critic_only: the policy stays as it is (on a shared trunk: without weight decay).
            unfinished: of an earlier update from the same experience, whose weights and optimizer
                state were loaded: only its other mini-batches are learned from. What is learned
                and returned is bitwise what it would have been in one go.
            stop: collective; asked between two mini-batches, ends the update there.
            max_not_finite: mini-batches that may be skipped because a loss or gradient of theirs is
                not finite.

        Returns:
            The same on every rank. Means over optimizer steps: ``loss``, ``grad_norm`` (before
            clipping). Means over learned tokens: ``entropy`` and what the algorithm reports
            (``policy_loss``, ``ratio_mean``, ``clip_fraction``, ``kl``, of a critic ``value_loss``,
            ``value``, ``value_clip_fraction``); maxima: ``ratio_max``. ``lr`` of the last step,
            ``tokens`` read without padding, ``padding_fraction``, and the metrics of the algorithm's
            lesson. Of a critic of its own ``critic/loss``, ``critic/grad_norm``, ``critic/lr``.
            ``skipped_steps``: mini-batches without an optimizer step, because all of their tokens
            were rejected or (``not_finite_steps``) a loss was not finite.

        Raises:
            UpdateStopped: ``stop`` returned True.
            NotFinite: a loss or gradient is not finite once too often. That optimizer did not step.
            ComponentError: there is nothing to learn from.
            ValueError: the algorithm needs reference log-probs or values, and there are none.
        """
        if not experience.rollouts:
            raise ComponentError("learner: no rollouts to learn from, all were excluded")
        lesson = algorithm.lesson(experience)
        begun = unfinished or UnfinishedUpdate(first_step=self.num_steps, mini_batches=0, steps=())
        steps, critic_steps = list(begun.steps), list(begun.critic_steps)
        not_finite = begun.not_finite
        plan = mini_batch_plan(
            len(experience.rollouts),
            algorithm.epochs,
            algorithm.mini_batches,
            seed=(self._seed, begun.first_step),
        )
        for number, indices in enumerate(plan[begun.mini_batches :], begun.mini_batches):
            if number > begun.mini_batches and stop():
                raise UpdateStopped(
                    UnfinishedUpdate(
                        first_step=begun.first_step,
                        mini_batches=number,
                        steps=tuple(steps),
                        critic_steps=tuple(critic_steps),
                        not_finite=not_finite,
                    )
                )
            items, names = lesson_items(
                lesson, experience.rollouts, indices, algorithm.loss_mean, self._max_new_tokens
            )
            if not items:
                continue
            try:
                if self.critic is not None:
                    assert algorithm.critic is not None
                    critic_steps.append(self.critic.step(algorithm.critic, items, names)[0])
                if not critic_only:
                    steps.append(self.policy.step(algorithm, items, names)[0])
                elif self.critic is None:
                    assert algorithm.critic is not None
                    step, _ = self.policy.step(algorithm.critic, items, names, head_only=True)
                    steps.append(step)
            except NotFinite as error:
                not_finite += 1
                if not_finite > max_not_finite:
                    raise
                logger.warning("mini-batch %d skipped: %s", number + 1, error)
        if not steps and not critic_steps:
            raise ComponentError(
                f"learner: optimizer step {self.num_steps}: nothing of the batch was learned from; "
                f"{lesson.metrics['rejected_fraction']:.0%} of its tokens were rejected by the "
                f"bounds of algorithm.off_policy, {not_finite} mini-batches were not finite"
            )
        done = max(len(steps), len(critic_steps))
        return {
            **_merged(steps, critic_steps),
            **lesson.metrics,
            "skipped_steps": float(len(plan) - done),
            "not_finite_steps": float(not_finite),
        }

    def sharded_state_dict(self, *, is_loading: bool) -> dict[str, Any]:
        """Everything to resume from, for ``megatron.core.dist_checkpointing``."""
        state = self.policy.sharded_state_dict(is_loading=is_loading)
        if self.critic is not None:
            state["critic"] = self.critic.sharded_state_dict(is_loading=is_loading)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`sharded_state_dict` described, onto this layout."""
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        self.policy.load_state_dict(state)


def lesson_items(
    lesson: Lesson,
    rollouts: Sequence[Rollout],
    indices: Sequence[int] | NDArray[np.integer],
    loss_mean: LossMean,
    max_new_tokens: int | None,
) -> tuple[list[PackItem], list[str]]:
    """What one mini-batch learns from, weighted, and the samples' names.

    The mean is over what is learned from: a completion whose tokens were all rejected counts as
    little as one that was never sampled.
    """
    learned = [int(lesson.learned[i].sum()) for i in indices]
    kept = [
        (i, n) for i, n in zip(indices, learned, strict=True) if n or not len(lesson.learned[i])
    ]
    weights = sequence_weights([n for _, n in kept], loss_mean, max_new_tokens)
    items: list[PackItem] = []
    names: list[str] = []
    for (i, count), weight in zip(kept, weights, strict=True):
        if count == 0:  # a completion without a token
            continue
        rollout, mask = rollouts[i], lesson.learned[i]
        item = completion_item(
            rollout.prompt.token_ids,
            rollout.completion.token_ids,
            learned=mask,
            **{WEIGHT: mask * np.float32(weight)},
            **{name: values[i] for name, values in lesson.fields.items()},
        )
        items.append(item)
        names.append(f"{rollout.prompt.uid}#{rollout.sample_index}")
    return items, names


def mini_batch_plan(
    samples: int, epochs: int, mini_batches: int, *, seed: Sequence[int]
) -> list[NDArray[np.intp]]:
    """Which samples each optimizer step learns from, in order.

    Every epoch goes through all samples once, in an order drawn from ``seed`` and the epoch when
    there are several mini-batches. Mini-batches without a sample are left out.

    Example:
        >>> [p.tolist() for p in mini_batch_plan(3, 2, 1, seed=[0])]
        [[0, 1, 2], [0, 1, 2]]
    """
    plan = []
    for epoch in range(epochs):
        order = np.arange(samples)
        if mini_batches > 1:
            order = np.random.default_rng([*seed, epoch]).permutation(samples)
        plan += [part for part in np.array_split(order, mini_batches) if len(part)]
    return plan


def _merged(steps: Sequence[StepStats], critic_steps: Sequence[StepStats]) -> dict[str, float]:
    """Statistics of an update; those that only a critic of its own has keep their names."""
    policy = merge(steps) if steps else {}
    critic = merge(critic_steps) if critic_steps else {}
    own = {f"critic/{name}": critic.pop(name) for name in _CRITICS_OWN if name in critic}
    return {**critic, **policy, **own}
