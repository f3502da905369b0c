"""A verifier process that can be killed: user code that hangs, crashes or leaks stays in there."""

import json
import os
import selectors
import subprocess
import sys
import time
from typing import Any

from hpc_rlhf.config import RewardConfig
from hpc_rlhf.errors import ComponentError

_START_TIMEOUT_S = 120.0  # imports of the user's module, from a slow filesystem


class VerifierFailure(Exception):
    """One sample could not be verified; the message says why. Not a reward of zero."""


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

    def score(self, completion: str, answer: str | None, fields: dict[str, Any]) -> float:
        """Apply the rule to one sample.

        Raises:
            VerifierFailure: it took longer than ``timeout_s``, died, raised, or returned no finite
                number.
            ComponentError: the process cannot be started.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        item = {"completion": completion, "answer": answer, "fields": fields}
        try:
            self._send(item)
            reply = self._receive(self._timeout_s)
        except TimeoutError:
            self.close()
            raise VerifierFailure(f"no reward within {self._timeout_s:g} s") from None
        except (BrokenPipeError, EOFError):
            code = self._end()
            raise VerifierFailure(f"verifier process died, exit code {code}") from None
        if "error" in reply:
            raise VerifierFailure(reply["error"])
        return float(reply["reward"])

    def close(self) -> None:
        """Kill the process and reap it."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def _start(self) -> None:
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hpc_rlhf.scoring.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self._send(self._rule)
            self._receive(_START_TIMEOUT_S)
        except (TimeoutError, BrokenPipeError, EOFError):
            self.close()
            raise ComponentError(
                f"scoring: the verifier process did not start within {_START_TIMEOUT_S:g} s; "
                "its error is in the log of learner rank 0"
            ) from None

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

    def _end(self) -> int:
        """Close the pipes and reap the process."""
        assert self._process is not None
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # what was not flushed has no reader any more
                    pass
        process.kill()
        return process.wait()
