import os
import signal
import time

import pytest

from hpc_rlhf.cluster.signals import StopFlag


def test_signal_sets_the_flag_and_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    flag = StopFlag()
    with flag.installed(("USR2", "SIGTERM", "USR2")):
        assert not flag.requested
        assert flag.reason is None
        began = time.time()
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
    assert flag.requested
    assert flag.reason == "SIGUSR2"
    assert [name for name, _ in flag.seen] == ["SIGUSR2", "SIGTERM"]
    assert began <= flag.seen[0][1] <= flag.seen[1][1]
    assert signal.getsignal(signal.SIGUSR2) is before


def test_request_from_within() -> None:
    flag = StopFlag()
    flag.request("the walltime is near")
    assert flag.reason == "the walltime is near"


def test_unknown_signal() -> None:
    with pytest.raises(ValueError, match="no signal is called USR9"):
        StopFlag().install(("USR9",))
