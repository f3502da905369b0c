"""A range of a flattened tensor is a few boxes of it."""

import itertools

import numpy as np
import pytest

from hpc_rlhf.learner.optimizer_shards import boxes


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 1, 4), (1, 6), (2, 3, 2)])
def test_boxes_cover_the_range_once_and_in_order(shape: tuple[int, ...]) -> None:
    whole = np.arange(np.prod(shape)).reshape(shape)
    for start, end in itertools.combinations_with_replacement(range(whole.size + 1), 2):
        found = boxes(shape, start, end)
        values = [
            whole[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].ravel()
            for offset, size in found
        ]
        assert np.concatenate([[], *values]).tolist() == list(range(start, end))
        assert len(found) <= 2 * len(shape) - 1


def test_a_range_of_a_matrix_is_a_part_of_a_row_whole_rows_and_a_part_of_a_row() -> None:
    assert boxes((4, 5), 3, 17) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    assert boxes((4, 5), 6, 8) == [((1, 1), (1, 2))]
    assert boxes((4, 5), 5, 15) == [((1, 0), (2, 5))]
    assert boxes((4, 5), 7, 7) == []
