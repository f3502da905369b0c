"""What a stop leaves of a rollout, and what the next attempt still has to sample."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpc_rlhf.rollout import spill
from hpc_rlhf.rollout.sampler import SampleRequest, join
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.types import Completion, FinishReason, Prompt, Rollout, VersionSpan

VERSION = 4
PROMPT = Prompt(uid="p.jsonl:1", token_ids=np.array([5, 6], np.int32), answer="7")


def completion(
    tokens: list[int], reason: FinishReason, seed: int, version: int = VERSION
) -> Completion:
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        finish_reason=reason,
        versions=(VersionSpan(version=version, start=0, end=len(tokens)),) if tokens else (),
        seed=seed,
    )


def rollout(index: int, done: Completion, step: int = 5) -> Rollout:
    return Rollout(prompt=PROMPT, sample_index=index, completion=done, step=step)


REQUESTS = [SampleRequest(prompt=PROMPT, sample_index=i, step=5, seed=100 + i) for i in range(4)]
LEFT = [
    rollout(0, completion([1, 2, 3], "stop", 100)),
    rollout(1, completion([4, 5], "abort", 101)),
    rollout(2, completion([], "abort", 102)),
]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.rollouts.mkdir()
    return run


def test_finished_samples_are_kept_and_unfinished_ones_continued(run: RunDir) -> None:
    spill.write(run, 5, LEFT)
    rest = spill.remainder(REQUESTS, spill.read(run, 5), version=VERSION, again=False)
    assert set(rest.finished) == {REQUESTS[0].key}
    assert [r.sample_index for r in rest.requests] == [1, 2, 3]
    prefix = rest.requests[0].prefix
    assert prefix is not None
    assert prefix.token_ids.tolist() == [4, 5]
    assert [r.prefix for r in rest.requests[1:]] == [None, None]
    assert (rest.kept_tokens, rest.dropped_tokens) == (5, 0)


def test_unfinished_samples_are_sampled_again_where_the_run_is_deterministic(run: RunDir) -> None:
    spill.write(run, 5, LEFT)
    rest = spill.remainder(REQUESTS, spill.read(run, 5), version=VERSION, again=True)
    assert rest.requests == tuple(REQUESTS[1:])
    assert (rest.kept_tokens, rest.dropped_tokens) == (3, 2)


def test_samples_of_another_step_version_or_seed_are_not_taken_up(run: RunDir) -> None:
    spill.write(run, 5, LEFT)
    assert spill.read(run, 6) == {}
    left = spill.read(run, 5)
    assert spill.remainder(REQUESTS, left, version=3, again=False).finished == {}
    other = [replace(request, seed=request.seed + 50) for request in REQUESTS]
    rest = spill.remainder(other, left, version=VERSION, again=False)
    assert rest.finished == {}
    assert rest.requests == tuple(other)


def test_what_a_stopped_attempt_did_not_come_to_stays(run: RunDir) -> None:
    """A step of several rounds: stopped in the second, resumed, and stopped in the first."""
    spill.write(run, 5, LEFT)
    spill.write(run, 5, [rollout(1, completion([4, 5, 6], "stop", 101))])
    left = {r.sample_index: r.completion for r in spill.read(run, 5).values()}
    assert {i: c.token_ids.tolist() for i, c in left.items()} == {0: [1, 2, 3], 1: [4, 5, 6], 2: []}
    spill.write(run, 6, [rollout(0, completion([7], "stop", 9), step=6)])
    assert spill.read(run, 5) == {}
    assert len(spill.read(run, 6)) == 1


def test_nothing_is_left_after_removal(run: RunDir) -> None:
    assert spill.read(run, 5) == {}
    spill.write(run, 5, LEFT)
    spill.remove(run)
    assert spill.read(run, 5) == {}
    spill.remove(run)


def test_a_continued_completion_is_one_completion() -> None:
    whole = join(completion([1, 2], "abort", 9), completion([3, 4, 5], "stop", 77, version=6))
    assert whole.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert whole.logprobs.tolist() == [-1, -2, -3, -4, -5]
    assert whole.finish_reason == "stop"
    assert whole.seed == 9
    assert whole.versions == (
        VersionSpan(version=VERSION, start=0, end=2),
        VersionSpan(version=6, start=2, end=5),
    )
