"""The helper itself: a test that cannot fail on a rank's failure proves nothing."""

import os
import signal
import time

import pytest
import torch

from tests.distributed.ranks import RankError, run_ranks

pytestmark = pytest.mark.distributed


def rank_squared() -> int:
    total = torch.tensor(torch.distributed.get_rank() ** 2)
    torch.distributed.all_reduce(total)
    return int(total) + torch.distributed.get_rank()


def test_results_come_in_rank_order() -> None:
    assert run_ranks(rank_squared, 3) == [5, 6, 7]


def test_first_failure_is_raised_with_its_rank_and_the_others_are_ended() -> None:
    def fails_on_one() -> None:
        if torch.distributed.get_rank() == 1:
            raise ValueError("this one")
        torch.distributed.barrier()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2:(.|\n)*ValueError: this one"):
        run_ranks(fails_on_one, 2, timeout_s=60)
    assert time.monotonic() - start < 20


def test_a_killed_rank_is_named() -> None:
    def dies_on_zero() -> None:
        if torch.distributed.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()

    with pytest.raises(RankError, match="rank 0 of 2:\nthe process died"):
        run_ranks(dies_on_zero, 2, timeout_s=60)


def test_time_is_bounded() -> None:
    def waits() -> None:
        if torch.distributed.get_rank() == 1:
            time.sleep(60)

    with pytest.raises(RankError, match=r"ranks \[.*1\] did not finish in 2 s"):
        run_ranks(waits, 2, timeout_s=2)
