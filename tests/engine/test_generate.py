"""Tokens in, tokens out: what a live server samples, and with which log-probabilities."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import pytest

from hpc_rlhf.config import SamplingConfig
from hpc_rlhf.rollout.client import SamplerClient, SamplerRefused
from hpc_rlhf.types import Completion, VersionSpan
from tests.engine.conftest import Fleet
from tests.engine.learners import EOS, prompts
from tests.engine.references import Reference

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]  # starting servers on busy cores
T = TypeVar("T")


def use(fleet: Fleet, what: Callable[[SamplerClient], Awaitable[T]]) -> T:
    async def run() -> T:
        async with SamplerClient(fleet.servers[0].endpoint(), fleet.token) as client:
            return await what(client)

    return asyncio.run(run())


async def sample(
    client: SamplerClient,
    sampling: SamplingConfig,
    *,
    number: int = 0,
    seed: int = 1,
    max_tokens: int = 32,
    stop: tuple[int, ...] = (EOS,),
) -> Completion:
    return await client.generate(
        prompts(number + 1)[number].token_ids,
        sampling,
        seed=seed,
        request_id=f"test-{number}-{seed}",
        max_tokens=max_tokens,
        stop_token_ids=stop,
        timeout_s=60,
    )


@pytest.fixture(scope="module")
def reference(tied_fleet: Fleet) -> Reference:
    return Reference(tied_fleet.model)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=1.0),
        SamplingConfig(temperature=0.6),
        SamplingConfig(temperature=1.3, top_k=12),
        SamplingConfig(temperature=0.9, top_p=0.7),
        SamplingConfig(temperature=1.5, top_p=0.8, top_k=40),
    ],
    ids=["plain", "tempered", "top-k", "top-p", "top-k-p"],
)
def test_log_probs_are_of_the_distribution_sampled_from(
    tied_fleet: Fleet, reference: Reference, sampling: SamplingConfig
) -> None:
    async def sample_some(client: SamplerClient) -> list[Completion]:
        return await asyncio.gather(*(sample(client, sampling, number=i, seed=i) for i in range(4)))

    for prompt, completion in zip(prompts(4), use(tied_fleet, sample_some), strict=True):
        expected = reference.log_probs(
            np.concatenate([prompt.token_ids, completion.token_ids]),
            len(prompt.token_ids),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        assert np.isfinite(expected).all()  # every sampled token is one that could be
        assert np.abs(completion.logprobs - expected).max() <= 1e-4
        assert completion.versions == (
            VersionSpan(version=0, start=0, end=len(completion.token_ids)),
        )


def test_greedy(tied_fleet: Fleet, reference: Reference) -> None:
    greedy = SamplingConfig(temperature=0.0, top_p=0.5, top_k=3)
    completion = use(tied_fleet, lambda client: sample(client, greedy))
    prompt = prompts(1)[0].token_ids
    tokens = np.concatenate([prompt, completion.token_ids])
    assert (reference.logits(tokens, len(prompt)).argmax(-1).numpy() == completion.token_ids).all()
    expected = reference.log_probs(tokens, len(prompt))
    assert np.abs(completion.logprobs - expected).max() <= 1e-4


def test_a_seed_gives_the_same_sample_in_any_company(tied_fleet: Fleet) -> None:
    sampling = SamplingConfig(temperature=1.0)
    seeds = [0, 1, 2**31, 2**63 - 1]

    async def alone(client: SamplerClient) -> list[Completion]:
        return [await sample(client, sampling, seed=seed) for seed in seeds]

    async def together(client: SamplerClient) -> list[Completion]:
        others = [sample(client, sampling, number=i % 5, seed=100 + i) for i in range(20)]
        results = await asyncio.gather(*(sample(client, sampling, seed=s) for s in seeds), *others)
        return list(results[: len(seeds)])

    first, second = use(tied_fleet, alone), use(tied_fleet, together)
    for a, b in zip(first, second, strict=True):
        assert a.token_ids.tobytes() == b.token_ids.tobytes()
        assert np.abs(a.logprobs - b.logprobs).max() <= 1e-5
    assert len({a.token_ids.tobytes() for a in first}) == len(seeds)


def test_a_stop_token_ends_the_completion_and_belongs_to_it(tied_fleet: Fleet) -> None:
    sampling = SamplingConfig(temperature=1.0)
    free = use(tied_fleet, lambda client: sample(client, sampling, stop=()))
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 32
    stop = int(free.token_ids[7])
    first = int(np.flatnonzero(free.token_ids == stop)[0])
    stopped = use(tied_fleet, lambda client: sample(client, sampling, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()


def test_nothing_of_the_model_directory_ends_a_completion(tied_fleet: Fleet) -> None:
    """The end-of-sequence token of config.json is not one unless the caller says so."""
    sampling = SamplingConfig(temperature=1.0)

    async def many(client: SamplerClient) -> list[Completion]:
        return await asyncio.gather(
            *(sample(client, sampling, seed=s, max_tokens=200, stop=()) for s in range(24))
        )

    completions = use(tied_fleet, many)
    assert any(EOS in completion.token_ids[:-1] for completion in completions)
    assert all(len(completion.token_ids) == 200 for completion in completions)


def test_an_aborted_request_returns_what_it_has(tied_fleet: Fleet) -> None:
    sampling = SamplingConfig(temperature=1.0)

    async def abort(client: SamplerClient) -> tuple[Completion, Completion]:
        doomed = asyncio.ensure_future(sample(client, sampling, seed=3, max_tokens=480, stop=()))
        other = asyncio.ensure_future(sample(client, sampling, seed=4, max_tokens=20, stop=()))
        whole = await other
        await client.abort(["test-0-3"])
        return await doomed, whole

    cut, whole = use(tied_fleet, abort)
    assert cut.finish_reason == "abort"
    assert 0 < len(cut.token_ids) < 480
    assert len(cut.logprobs) == len(cut.token_ids)
    assert cut.versions[-1].end == len(cut.token_ids)
    assert whole.finish_reason == "length"


def test_a_prompt_that_does_not_fit_is_refused(tied_fleet: Fleet) -> None:
    async def too_long(client: SamplerClient) -> Completion:
        return await client.generate(
            np.full(600, 9),
            SamplingConfig(),
            seed=1,
            request_id="long",
            max_tokens=5,
            stop_token_ids=[],
            timeout_s=20,
        )

    with pytest.raises(SamplerRefused, match="400") as caught:
        use(tied_fleet, too_long)
    assert caught.value.status == 400
