import argparse

import pytest

from tools import bench_learner
from tools.bench_learner import flops, sequences


def test_flops_are_counted_by_hand() -> None:
    shape = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    # q, o: 8 x 8; k, v: 8 x 4; gate, up, down: 8 x 16; and the output matrix
    weights = 2 * (2 * 64 + 2 * 32 + 3 * 128) + 800
    # one sequence of 10 tokens: 50 causal pairs, scores and values at 2 FLOP, heads x 4 wide,
    # forward once and backward twice
    attention = 2 * (50 * 8 * 2 * 2 * 3)
    assert flops(shape, [10]) == 6 * weights * 10 + attention
    assert flops(shape, [10, 10]) == 2 * flops(shape, [10])


@pytest.mark.parametrize("lengths", ["equal", "ragged"])
def test_batches_have_the_tokens_that_were_asked_for(lengths: str) -> None:
    arguments = argparse.Namespace(shape="tiny", lengths=lengths, tokens=16384, longest=1024)
    experience = sequences(arguments)
    found = [len(rollout.token_ids) for rollout in experience.rollouts]
    assert sum(found) == pytest.approx(16384, abs=160)
    assert max(found) <= 1024
    assert (len(set(found)) == 1) == (lengths == "equal")
    batches = bench_learner._padded_batches(experience, 2048)
    assert sorted(i for batch in batches for i in batch) == list(range(len(found)))
    assert all(len(batch) * max(found[i] for i in batch) <= 2048 for batch in batches)
