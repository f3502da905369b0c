from collections import Counter

from hpc_rlhf.data.order import examples_of_step


def test_every_epoch_takes_every_example_once_in_an_order_of_its_own() -> None:
    drawn = [int(i) for step in range(1, 8) for i in examples_of_step(7, 3, step, seed=0)]
    epochs = [drawn[:7], drawn[7:14], drawn[14:]]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = [int(i) for step in range(1, 4) for i in examples_of_step(7, 3, step, seed=1)]
    assert other[:7] != epochs[0]


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert Counter(examples_of_step(2, 5, 1, seed=0).tolist()).most_common()[0][1] == 3


def test_the_order_of_the_file() -> None:
    assert examples_of_step(5, 3, 2, seed=None).tolist() == [3, 4, 0]


def test_the_order_is_the_same_for_ever() -> None:
    """A run that is resumed with another version of NumPy goes on in its order."""

    def mix(value: int) -> int:  # SplitMix64 in Python's integers
        z = (value + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    start = mix(mix(42) ^ 0)
    expected = sorted(range(10), key=lambda i: mix((i + start) % 2**64))
    assert (
        examples_of_step(10, 10, 1, seed=42).tolist() == expected == [3, 6, 8, 0, 4, 9, 7, 1, 2, 5]
    )
