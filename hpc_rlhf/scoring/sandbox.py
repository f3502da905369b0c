"""A verifier process that can be killed: user code that hangs, crashes or leaks stays in there."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from hpc_rlhf.cluster.signals import REQUESTS
from hpc_rlhf.config import RewardConfig
from hpc_rlhf.errors import ComponentError, UserError, WaitTimeout

_START_TIMEOUT_S = 120.0  # imports of the user's module, from a slow filesystem
_EXIT_GRACE_S = 1.0  # between the last that is heard of a process and its exit
_END_TIMEOUT_S = 30.0  # of a killed process; only one that hangs in the kernel takes longer


@contextlib.contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread, and in the processes that it starts until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class VerifierFailure(Exception):
    """One sample could not be verified; the message says why. Not a reward of zero."""


class VerifierTimeout(VerifierFailure):
    """It took too long."""


class VerifierProcess:
    """One worker process, started at first use and again after it had to be killed."""

    def __init__(self, config: RewardConfig) -> None:
        self._rule = {
            "name": config.name.value,
            "pattern": config.pattern,
            "function": config.function,
        }
        self._timeout_s = config.timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def start(self) -> None:
        """Start the process, and have it import the rule.

        Raises:
            UserError: the rule cannot be made there: a bad pattern, a function without a module.
            ComponentError: the process did not get that far.
        """
        self._unread = b""
        with _blocked(REQUESTS):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hpc_rlhf.scoring.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a group of its own, so that its children die with it
            )
        try:
            self._send(self._rule)
            reply = self._receive(_START_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise ComponentError(
                f"scoring: the verifier process was not ready within {_START_TIMEOUT_S:g} s"
            ) from None
        except (BrokenPipeError, EOFError):
            code = self._end(grace_s=_EXIT_GRACE_S)
            raise ComponentError(
                f"scoring: the verifier process died while it started, exit code {code}; "
                "its error is on the standard error above"
            ) from None
        if "error" in reply:
            self.close()
            raise UserError(reply["error"])

    def score(self, completion: str, answer: str | None, fields: dict[str, Any]) -> float:
        """Apply the rule to one sample.

        Raises:
            VerifierFailure: it took longer than ``timeout_s``, died, raised, or returned no finite
                number.
            UserError, ComponentError: the process cannot be started; see :meth:`start`.
        """
        if self._process is None:
            self.start()
        try:
            self._send({"completion": completion, "answer": answer, "fields": fields})
            reply = self._receive(self._timeout_s)
        except TimeoutError:
            self.close()
            raise VerifierTimeout(f"no reward within {self._timeout_s:g} s") from None
        except (BrokenPipeError, EOFError):
            code = self._end(grace_s=_EXIT_GRACE_S)
            raise VerifierFailure(f"verifier process died, exit code {code}") from None
        if "error" in reply:
            raise VerifierFailure(reply["error"])
        return float(reply["reward"])

    def close(self) -> None:
        """Kill the process and its children, and reap it."""
        if self._process is not None:
            self._end()

    def _send(self, value: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value, default=str).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise EOFError
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def _end(self, grace_s: float = 0.0) -> int:
        """Kill what is left of the process group, close the pipes, and return the exit code.

        Args:
            grace_s: let the process end by itself for so long, for the sake of its exit code.
        """
        assert self._process is not None
        process, self._process = self._process, None
        # Not reaped before its group is killed: until then the number cannot be somebody else's.
        deadline = time.monotonic() + grace_s
        unreaped = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while time.monotonic() < deadline and os.waitid(os.P_PID, process.pid, unreaped) is None:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(
                BrokenPipeError
            ):  # what was not flushed has no reader any more
                pipe.close()
        try:
            return process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise WaitTimeout(
                f"scoring: verifier process {process.pid} did not end within {_END_TIMEOUT_S:g} s "
                "of SIGKILL: it hangs in the kernel, most likely on a filesystem"
            ) from None
