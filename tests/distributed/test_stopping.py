"""All ranks stop at the same save point, for a signal to one of them or for the walltime."""

import os
import signal

import pytest
import torch.distributed as dist

from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.cluster.signals import StopFlag
from hpc_rlhf.cluster.stopping import SavePoints
from hpc_rlhf.cluster.walltime import Deadline, WalltimeGuard
from hpc_rlhf.types import Phase
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_a_signal_to_one_rank_stops_all() -> None:
    def ask() -> tuple[list[bool], list[str]]:
        announced: list[str] = []
        flag = StopFlag()
        points = SavePoints(flag, ControlGroup(30.0), None, announced.append)
        with flag.installed():
            before = points.stop_before(Phase.TRAIN)
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return [before, points.stop_before(), points.stop_before(Phase.TRAIN)], announced

    # it came from outside: whoever sent it knows
    assert run_ranks(ask, 2) == [([False, True, True], [])] * 2


def test_what_does_not_fit_before_the_walltime_is_not_begun() -> None:
    """Rank 0 has 60 s; the others do not ask the time."""

    def ask() -> tuple[list[bool], list[str], bool]:
        announced: list[str] = []
        clock = [0.0]
        guard = None
        if dist.get_rank() == 0:
            deadline = Deadline(end=100.0, margin_s=40.0, now=lambda: clock[0])
            guard = WalltimeGuard(deadline)
        flag = StopFlag()
        points = SavePoints(flag, ControlGroup(30.0), guard, announced.append)
        answers = [points.stop_before(Phase.TRAIN, Phase.SYNC)]  # nothing was ever measured
        if guard is not None:
            guard.observe({"time/train": 30.0, "time/sync": 5.0, "time/checkpoint": 20.0})
        answers.append(points.stop_before(Phase.TRAIN, Phase.SYNC))  # 55 s
        clock[0] = 10.0
        answers.append(points.stop_before())  # a rollout can be left at any moment
        answers.append(points.stop_before(Phase.TRAIN, Phase.SYNC))
        answers.append(points.stop_before())  # who has decided to stop does not begin again
        return answers, announced, flag.requested

    decided = [False, False, False, True, True]
    reason = "walltime: 50 s are left, train + sync + checkpoint take up to 55 s"
    assert run_ranks(ask, 2) == [(decided, [reason], True), (decided, [], False)]
