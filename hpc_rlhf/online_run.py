"""An online run's components bound together: what the loop calls, phase by phase.

Every method is collective over the learner. What only the coordinator (learner rank 0) holds
(prompts, samplers, verifiers, files) is in :class:`Coordinator`; the other ranks have None there.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hpc_rlhf.checkpoint.save_point import SavePoint
from hpc_rlhf.checkpoint.saving import Saving
from hpc_rlhf.cluster import device
from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.cluster.stopping import SavePoints, StopRequested
from hpc_rlhf.cluster.walltime import WalltimeGuard
from hpc_rlhf.config import OffPolicyConfig, RunConfig, SamplingConfig
from hpc_rlhf.data.prompts import PromptCursor, PromptDataset
from hpc_rlhf.errors import ComponentError
from hpc_rlhf.fs import publish_json
from hpc_rlhf.learner import off_policy
from hpc_rlhf.learner.actor_critic import ActorCritic, UnfinishedUpdate, UpdateStopped
from hpc_rlhf.learner.algorithms import Algorithm
from hpc_rlhf.learner.kl_control import KlController
from hpc_rlhf.learner.memory import of_model
from hpc_rlhf.learner.stats import sequence_kl
from hpc_rlhf.models.megatron import PolicyModel, export_hf
from hpc_rlhf.observe.metrics import MetricsWriter
from hpc_rlhf.observe.startup import StartUp, publish_report
from hpc_rlhf.observe.timeline import StepTimes
from hpc_rlhf.rollout import spill, store
from hpc_rlhf.rollout.batch import StepBatch, sample_requests
from hpc_rlhf.rollout.sampler import Done, Joined, SamplerPool
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.scoring.scorer import Scorer
from hpc_rlhf.sync.collective import CollectiveTransport
from hpc_rlhf.types import Experience, Phase, Readings, Rollout, Scores

logger = logging.getLogger(__name__)

# How often the ranks look at each other while the samplers work: how soon a stop is seen.
TICK_S = 1.0
# For the samplers to hand over what they have; a grace time can be as short as 30 s.
INTERRUPT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class MidStep:
    """A step that an attempt left between two optimizer steps, for the next one to go on with."""

    experience: Experience
    update: UnfinishedUpdate


@dataclass
class Coordinator:
    """What learner rank 0 holds beside its share of the model."""

    dataset: PromptDataset
    pool: SamplerPool
    metrics: MetricsWriter
    walltime: WalltimeGuard

    def close(self) -> None:
        self.pool.close()
        self.metrics.close()


@dataclass
class OnlineRun:
    """State and components of one attempt at an online run."""

    directory: RunDir
    attempt: int
    config: RunConfig
    sampling: SamplingConfig
    algorithm: Algorithm
    kl: KlController  # of the step under way
    off_policy: OffPolicyConfig
    critic_warmup_steps: int  # first steps, in which only the critic learns
    max_skipped_steps: int  # mini-batches of the run whose loss is not finite
    sampling_rounds: int  # of a step; more than one: dynamic sampling
    trainer: ActorCritic
    reference: PolicyModel | None
    scorer: Scorer
    transport: CollectiveTransport
    saving: Saving
    control: ControlGroup
    save_points: SavePoints
    source: Path  # the Hugging Face directory that configuration and tokenizer come from
    coordinator: Coordinator | None
    startup: StartUp
    completed: int = 0  # finished steps; the policy version, too
    cursor: PromptCursor = field(default_factory=PromptCursor)  # behind the last finished step
    next_cursor: PromptCursor | None = None  # behind the one under way
    stats: dict[str, float] = field(default_factory=dict)  # of the step under way
    skipped: int = 0  # mini-batches whose loss or gradient was not finite
    readings: Readings | None = None  # of the samples of the step under way
    mid_step: MidStep | None = None
    optimizer_steps: int = 0  # of the step under way, by this attempt

    def remaining(self) -> Iterator[int]:
        """The steps to do, counted from 1."""
        yield from range(self.completed + 1, self.config.steps + 1)

    def resume(self) -> None:
        """Load the newest whole checkpoint that can be gone on from, if there is one."""
        found = self.saving.resume(self.trainer, reject=self._no_experience)
        if found is not None:
            point, state = found
            self.completed = point.step
            self.cursor = PromptCursor(**state["cursor"])
            self.kl = replace(self.kl, coef=state["kl_coef"])
            self.skipped = state["skipped"]
            if point.mini_batches:
                self._resume_mid_step(**state["mid_step"])
        if self.coordinator is not None:
            self.coordinator.metrics.truncate(self.completed)

    def _no_experience(self, point: SavePoint) -> str | None:
        """Why there is nothing to go on with in the middle of a step; None if there is."""
        if point.mini_batches == 0:
            return None
        try:
            store.read_scored(self._rollouts(point.step + 1))
        except (OSError, ValueError, KeyError) as error:
            return f"the samples of its step under way cannot be read: {error}"
        return None

    def _resume_mid_step(
        self, update: dict[str, Any], stats: dict[str, float], cursor: dict[str, Any]
    ) -> None:
        experience = None
        if self.coordinator is not None:
            experience = make_experience(*store.read_scored(self._rollouts(self.completed + 1)))
        experience = self.control.broadcast(experience)
        assert experience is not None
        self.mid_step = MidStep(experience, UnfinishedUpdate.from_json(update))
        self.stats, self.next_cursor = stats, PromptCursor(**cursor)

    def publish(self) -> None:
        """Give every sampler the current weights, as policy version ``completed``.

        Not before a stop, after which the next attempt begins with it; and not in the middle of a
        step, whose weights are no version and are not sampled from.
        """
        if self.mid_step is not None:
            return
        if self.save_points.stop_before(Phase.SYNC):
            self.stats |= {"sync/bytes": 0, "sync/replicas": 0, "sync/total_seconds": 0.0}
            return
        sync = self.transport.publish(self.trainer.model, self.completed)
        self.stats |= {
            "sync/bytes": sync.bytes,
            "sync/replicas": sync.replicas,
            **{f"sync/{part}_seconds": seconds for part, seconds in sync.seconds.items()},
        }

    def begin(self, step: int) -> StepBatch:
        """The batch of ``step``, nothing of it sampled; whole if the step was left in its middle.

        Raises:
            StopRequested: nothing was sampled.
        """
        if self.save_points.stop_before():
            raise StopRequested
        if self.mid_step is not None:
            self._end_startup(time.time())
            return StepBatch(step=step, prompts=0)
        self.stats, self.next_cursor = {}, self.cursor
        return StepBatch(
            step=step, prompts=self.config.prompts_per_step, max_rounds=self.sampling_rounds
        )

    def collect(self, batch: StepBatch) -> StepBatch:
        """Sample a round under the current weights, what an earlier attempt left of it included.

        Raises:
            StopRequested: finished and unfinished samples of the step are on disk.
        """
        self._stop_with(batch)
        rest = None
        if self.coordinator is not None:
            assert self.next_cursor is not None
            prompts, self.next_cursor = self.coordinator.dataset.batch(
                self.next_cursor, batch.wanted, self.config.seed
            )
            requests = sample_requests(
                prompts,
                self.sampling.samples_per_prompt,
                self.config.seed,
                batch.step,
                before=batch.rollouts,
            )
            rest = spill.remainder(
                requests,
                spill.read(self.directory, batch.step),
                version=self.completed,
                again=self.config.deterministic,
            )
            self.coordinator.pool.begin(rest.requests, self.completed)
            self._count(
                {
                    "rollout/kept_tokens": rest.kept_tokens,
                    "rollout/dropped_tokens": rest.dropped_tokens,
                }
            )
        while True:
            event = self.coordinator.pool.wait_event(TICK_S) if self.coordinator else None
            event = self.control.broadcast(event)
            self._end_startup()
            if isinstance(event, Done):
                break
            if self.save_points.stop_before():
                self._leave(batch, rest)
            if isinstance(event, Joined):  # a replica was started again: weights before any work
                self.transport.publish(self.trainer.model, self.completed)
        rollouts: tuple[Rollout, ...] = ()
        if rest is not None:
            sampled = {rollout.key: rollout for rollout in event.rollouts}
            both = {**rest.finished, **sampled}
            rollouts = tuple(both[request.key] for request in requests)
        rollouts, self.next_cursor = self.control.broadcast((rollouts, self.next_cursor))
        self._count(event.stats.as_metrics())
        if not event.rollouts:  # an earlier attempt had sampled them all
            self._end_startup(time.time())
        return batch.sampled(rollouts)

    def _count(self, found: dict[str, float]) -> None:
        """Add a round's numbers to those of the rounds before."""
        self.stats |= {name: self.stats.get(name, 0) + value for name, value in found.items()}
        if "rollout/tokens" in found:
            speed = self.stats["rollout/tokens"] / self.stats["rollout/seconds"]
            self.stats["rollout/tokens_per_second"] = speed

    def _leave(self, batch: StepBatch, rest: spill.Remainder | None) -> NoReturn:
        """Abort what is being sampled and put everything on disk."""
        if self.coordinator is not None and rest is not None:
            found = self.coordinator.pool.interrupt(INTERRUPT_TIMEOUT_S)
            # one that was to be continued and did not start again keeps what it has
            waiting = [
                Rollout(
                    prompt=request.prompt,
                    sample_index=request.sample_index,
                    completion=request.prefix,
                    step=request.step,
                )
                for request in found.unstarted
                if request.prefix is not None
            ]
            rollouts = [
                *batch.rollouts,
                *rest.finished.values(),
                *found.finished,
                *found.partial,
                *waiting,
            ]
            spill.write(self.directory, batch.step, rollouts)
        raise StopRequested

    def score(self, batch: StepBatch) -> StepBatch:
        """Reward a round's samples, while the learner reads them if none will be dropped.

        Raises:
            StopRequested: the samples of the step are on disk.
        """
        self._stop_with(batch)
        scoring = self.scorer.start(batch.fresh)
        if not batch.is_dynamic:
            self.readings = self.trainer.read(batch.fresh, self.reference)
        scoring.wait()
        # Before a look at the result: the signal to stop may have gone to what verifiers run, too.
        self._stop_with(batch, Phase.TRAIN, Phase.SYNC)
        return batch.scored(scoring.result())

    def experience(self, batch: StepBatch) -> Experience:
        """What there is to learn from a whole batch: scored, and read by policy, reference, critic."""
        if self.mid_step is not None:
            return self.mid_step.experience
        assert batch.scores is not None
        self.stats |= {**rollout_stats(batch.rollouts, batch.scores), **batch.metrics()}
        kept = batch.whole()
        if batch.is_dynamic:
            self.readings = self.trainer.read(kept.rollouts, self.reference)
        readings, self.readings = self.readings, None
        assert kept.scores is not None
        assert readings is not None
        if self.coordinator is not None:
            path = self._rollouts(batch.step)
            store.write_step(path, kept.rollouts, kept.scores, readings)
            spill.remove(self.directory)
        experience = make_experience(kept.rollouts, kept.scores, readings)
        self._watch_mismatch(experience)
        return experience

    def _watch_mismatch(self, experience: Experience) -> None:
        """Measure how far the samplers are from the learner, and raise the alarm if it is far.

        Raises:
            ComponentError: beyond ``algorithm.off_policy.stop_kl``.
        """
        mismatch = off_policy.measure(experience)
        warn, stop = self.off_policy.warn_kl, self.off_policy.stop_kl
        self.stats |= {**mismatch.as_metrics(), "sampler_alarm": float(mismatch.kl > warn)}
        if stop is not None and mismatch.kl > stop:
            what = off_policy.alarm(mismatch, stop, self.off_policy)
            raise ComponentError(f"learner: step {self.completed + 1}: {what}")
        if mismatch.kl > warn and self.control.is_coordinator:
            what = off_policy.alarm(mismatch, warn, self.off_policy)
            logger.warning("step %d: %s", self.completed + 1, what)

    def _stop_with(self, batch: StepBatch, *before: Phase) -> None:
        """If it is time to stop, leave the finished samples of a step to the next attempt."""
        if self.save_points.stop_before(*before):
            if self.coordinator is not None and batch.rollouts:
                spill.write(self.directory, batch.step, batch.rollouts)
            raise StopRequested

    def update(self, experience: Experience) -> None:
        """Learn from the experience; the weights become the next policy version.

        Raises:
            StopRequested: there are mini-batches left, of :attr:`mid_step`.
        """
        before = self.trainer.num_steps
        try:
            self.stats |= self.trainer.update(
                self.algorithm.with_kl_coef(self.kl.coef),
                experience,
                critic_only=self.completed < self.critic_warmup_steps,
                max_not_finite=self.max_skipped_steps - self.skipped,
                unfinished=self.mid_step.update if self.mid_step else None,
                stop=lambda: self.save_points.stop_before("optimizer_step", Phase.SYNC),
            )
        except UpdateStopped as stopped:
            self.mid_step = MidStep(experience, stopped.unfinished)
            raise StopRequested from None
        self.optimizer_steps = self.trainer.num_steps - before
        self.skipped += int(self.stats["not_finite_steps"])
        self.mid_step = None
        kl = sequence_kl(experience)
        if kl is not None:
            self.stats |= {"kl_sequence": kl, "kl_coef": self.kl.coef}
            self.kl = self.kl.after(kl)
        self.completed += 1
        assert self.next_cursor is not None
        self.cursor = self.next_cursor

    def checkpoint_due(self, step: int) -> bool:
        return self.saving.due(step)

    def save(self, *, wait: bool) -> None:
        """Save where the run is, in the middle of a step with what is left of it."""
        update = self.mid_step.update if self.mid_step else None
        state: dict[str, Any] = {
            "cursor": vars(self.cursor),
            "kl_coef": self.kl.coef,
            "skipped": self.skipped,
        }
        if update is not None:
            state["mid_step"] = {
                "update": update.to_json(),
                "stats": self.stats,
                "cursor": vars(self.next_cursor),
            }
        point = SavePoint(self.completed, update.mini_batches if update else 0)
        self.saving.save(point, self.trainer, state, wait=wait)

    def _rollouts(self, step: int) -> Path:
        return self.directory.rollouts / f"step_{step}.h5"

    def record(self, times: StepTimes) -> None:
        """Append the step's metrics, once per step whatever was resumed."""
        if self.coordinator is None:
            return
        self.stats |= self.saving.cost()
        self._end_startup()
        record: dict[str, Any] = {**self.stats, **times.as_metrics(), **self._memory()}
        # what is not begun late in the walltime
        record["time/optimizer_step"] = times.seconds[Phase.TRAIN] / max(1, self.optimizer_steps)
        self.coordinator.metrics.write(self.completed, self.attempt, record)
        self.coordinator.walltime.observe(record)

    def _end_startup(self, at: float | None = None) -> None:
        """Once: say how long the attempt took to begin.

        Args:
            at: Unix time; default: that of the first token, if a sampler says that it has sampled one.
        """
        if self.coordinator is None or self.startup.ended:
            return
        endpoints = self.coordinator.pool.published()
        times = [e.first_token for e in endpoints if e.first_token is not None]
        at = min(times, default=at)
        if at is not None:
            self.startup.end(at)
            attempt = self.directory.attempt(self.attempt)
            samplers = {str(endpoint.replica): endpoint.startup for endpoint in endpoints}
            self.stats |= publish_report(attempt, self.startup, samplers).as_metrics()

    def _memory(self) -> dict[str, float]:
        """What this rank holds of each model, and the most that its device held in this attempt."""
        reference = of_model(self.reference).as_metrics("reference") if self.reference else {}
        return {
            **self.trainer.memory(),
            **reference,
            **self.scorer.memory(),
            "memory/peak_bytes": float(device.peak_memory_bytes()),
        }

    def complete(self) -> None:
        """Export the policy as a Hugging Face directory and mark the run complete."""
        target = self.directory.policy
        export_hf(self.trainer.model, self.source, target)
        self.saving.manager.wait()
        if self.control.is_coordinator:
            publish_json(self.directory.complete, {"step": self.completed, "policy": str(target)})

    def close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()
        self.scorer.close()
        self.saving.manager.close()


def make_experience(
    rollouts: tuple[Rollout, ...], scores: Scores, readings: Readings
) -> Experience:
    """What is learned from scored rollouts: all but the excluded ones."""
    kept = [i for i in range(len(rollouts)) if i not in scores.excluded]
    reference, values = readings.reference, readings.values
    return Experience(
        rollouts=tuple(rollouts[i] for i in kept),
        rewards=scores.rewards[kept],
        old_logprobs=tuple(readings.old[i] for i in kept),
        ref_logprobs=tuple(reference[i] for i in kept) if reference else None,
        values=tuple(values[i] for i in kept) if values else None,
    )


def rollout_stats(rollouts: tuple[Rollout, ...], scores: Scores) -> dict[str, float]:
    """Reward and response-length statistics of one batch."""
    lengths = np.array([len(rollout.completion.token_ids) for rollout in rollouts])
    cut = np.mean([rollout.completion.finish_reason == "length" for rollout in rollouts])
    return {
        "reward/mean": float(np.nanmean(scores.rewards)),
        "reward/std": float(np.nanstd(scores.rewards)),
        "reward/excluded": len(scores.excluded),
        "response_length/mean": float(lengths.mean()),
        "response_length/p90": float(np.percentile(lengths, 90)),
        "response_length/max": float(lengths.max()),
        "response_length/truncated_fraction": float(cut),
    }
