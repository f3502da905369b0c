"""What a learner has to say to the person at the terminal: lines that the supervisor repeats.

``ATTEMPT/notices.log`` is written by the coordinator alone, and read by the supervisor, which may be
on another node.
"""

import logging
import time

from hpc_rlhf.run_dir import Attempt

logger = logging.getLogger(__name__)

POLL_S = 1.0


def tell(attempt: Attempt, message: str) -> None:
    """Have the supervisor of ``attempt`` say ``message``; it is in this process's log, too."""
    logger.info("%s", message)
    try:
        with attempt.notices.open("a") as file:
            file.write(message.replace("\n", " ") + "\n")
    except OSError as error:  # a full disk; what has to be done there fails by itself
        logger.warning("not told to the supervisor: %s", error)


class Notices:
    """The notices of an attempt as they come."""

    def __init__(self, attempt: Attempt) -> None:
        self._path = attempt.notices
        self._read = 0  # bytes
        self._next_look = 0.0  # monotonic

    def poll(self) -> list[str]:
        """As :meth:`new`, at most once in ``POLL_S``: the supervisor asks more often than a parallel
        filesystem likes to be asked."""
        if time.monotonic() < self._next_look:
            return []
        self._next_look = time.monotonic() + POLL_S
        return self.new()

    def new(self) -> list[str]:
        """Lines that were not returned before."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()
