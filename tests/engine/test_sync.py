"""Weights from a live Megatron learner to live servers: exactly those, whole, and versioned."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_rlhf.config import ParallelConfig, SamplingConfig
from hpc_rlhf.models.megatron import export_hf, hf_metadata
from hpc_rlhf.rollout.sampler import Done, SampleRequest
from hpc_rlhf.sync.collective import SyncStats
from hpc_rlhf.types import Rollout
from tests.engine.conftest import Fleet
from tests.engine.learners import Learner, at_tensor, requests, train_a_bit
from tests.engine.references import Reference

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]  # starting servers on busy cores


@dataclass
class Round:
    """One version: where it was exported to, what the servers sampled from it."""

    directory: Path
    stats: SyncStats
    rollouts: tuple[Rollout, ...]


def sample(learner: Learner, batch: list[SampleRequest], version: int) -> Done | None:
    event = None
    if learner.pool is not None:
        learner.pool.begin(batch, version)
        event = learner.pool.wait_event()
        assert isinstance(event, Done)
    return learner.control.broadcast(event)


def publish_rounds(
    fleet: Fleet, parallel: ParallelConfig, directory: Path, first_version: int
) -> list[Round]:
    def scenario(learner: Learner) -> list[Round]:
        rounds = []
        for version in (first_version, first_version + 1):
            train_a_bit(learner.model, how=version)
            target = directory / str(version)
            export_hf(learner.model, fleet.model, target)
            stats = learner.transport.publish(learner.model, version)
            done = sample(learner, requests(8, version), version)
            assert done is not None
            rounds.append(Round(target, stats, done.rollouts))
        return rounds

    return fleet.learn(scenario, parallel=parallel)


def check(rounds: list[Round], replicas: int) -> None:
    texts = []
    for number, current in enumerate(rounds):
        reference = Reference(current.directory)
        assert all(reference.is_greedy(rollout) for rollout in current.rollouts)
        assert all(
            [span.version for span in rollout.completion.versions] == [current.stats.version]
            for rollout in current.rollouts
        )
        assert current.stats.replicas == replicas
        assert current.stats.dropped == ()
        assert current.stats.tries == 1
        # the groups stand after the first time
        assert ("form" in current.stats.seconds) == (number == 0)
        texts.append([r.completion.token_ids.tolist() for r in current.rollouts])
    assert texts[0] != texts[1]  # else old weights would pass for new ones


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2)], ids=["1-rank", "tp2-pp2"])
def test_greedy_tokens_are_those_of_the_exported_weights(
    fleet: Fleet, tmp_path: Path, tensor: int, pipeline: int
) -> None:
    """At TP=1 (replica 0) and TP=2 (replica 1), from a learner of one rank and of four."""
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    rounds = publish_rounds(fleet, parallel, tmp_path, 10 * tensor)
    check(rounds, replicas=2)


def test_tied_embeddings(tied_fleet: Fleet, tmp_path: Path) -> None:
    parallel = ParallelConfig(pipeline=2)
    check(publish_rounds(tied_fleet, parallel, tmp_path, 1), replicas=1)

    def restore(learner: Learner) -> None:
        learner.transport.publish(learner.model, 0)

    tied_fleet.learn(
        restore,
    )


def test_completions_that_span_two_versions(fleet: Fleet, tmp_path: Path) -> None:
    """Weights that change under a completion: each token is of the version its span says.

    The tokens before the change count under the new weights too: nothing computed with the old
    ones is kept.
    """
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=450)

    def scenario(learner: Learner) -> tuple[Rollout, ...]:
        pool = learner.pool
        assert pool is not None
        export_hf(learner.model, fleet.model, tmp_path / "40")
        learner.transport.publish(learner.model, 40)
        train_a_bit(learner.model, how=1)
        export_hf(learner.model, fleet.model, tmp_path / "41")

        def sample_meanwhile() -> None:
            pool.begin(requests(4, 40, samples=2), 40)
            assert pool.wait_event(timeout_s=0.2) is None, "done too soon"

        at_tensor(len(hf_metadata(learner.model)) - 1, sample_meanwhile)
        learner.transport.publish(learner.model, 41)
        event = pool.wait_event()
        assert isinstance(event, Done)
        return event.rollouts

    rollouts = fleet.learn(
        scenario,
        sampling=sampling,
    )
    references = {version: Reference(tmp_path / str(version)) for version in (40, 41)}
    versions = [[s.version for s in rollout.completion.versions] for rollout in rollouts]
    assert [40, 41] in versions
    for rollout in rollouts:
        for span in rollout.completion.versions:
            expected = references[span.version].log_probs(
                rollout.token_ids, len(rollout.prompt.token_ids)
            )
            difference = (rollout.completion.logprobs - expected)[span.start : span.end]
            assert np.abs(difference).max() <= 1e-4


def test_log_probs_of_learner_and_sampler_agree(fleet: Fleet) -> None:
    """On the same tokens, of the tempered distribution, in fp32."""
    sampling = SamplingConfig(temperature=0.7, max_new_tokens=48)

    def scenario(learner: Learner) -> float:
        learner.transport.publish(learner.model, 50)
        done = sample(learner, requests(8, 50, samples=2), 50)
        assert done is not None
        worst = 0.0
        for rollout in done.rollouts:
            tokens = torch.from_numpy(rollout.token_ids.astype(np.int64))
            length = len(tokens) - 1
            with torch.no_grad():
                hidden = learner.model(
                    tokens[:-1], torch.arange(length), torch.tensor([0, length], dtype=torch.int32)
                )
                found, _ = learner.model.log_probs(
                    hidden, tokens[1:], temperature=sampling.temperature, chunk_tokens=16
                )
            found = found[len(rollout.prompt.token_ids) - 1 :].numpy()
            worst = max(worst, float(np.abs(found - rollout.completion.logprobs).max()))
        return worst

    worst = fleet.learn(
        scenario,
        parallel=ParallelConfig(tensor=2),
        sampling=sampling,
    )
    print(f"max |log-prob of the learner - log-prob of the sampler| = {worst:.1e}")
    assert worst <= 1e-4
