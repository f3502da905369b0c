"""Errors that a user can act on, and the exit codes of every program."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes, the same for every ``hpc-rlhf`` command and component."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2  # nothing was queued, nothing was written
    INTERRUPTED = 75  # EX_TEMPFAIL: state is durable, run the same command again


class UserError(Exception):
    """Bad input: printed as one message without a traceback, exit code 2.

    The message says where (file and line, or the override), what was expected and what to do.
    """


class ComponentError(RuntimeError):
    """A component of a running attempt failed; the message names component, node, rank and phase."""


class WaitTimeout(ComponentError):
    """A bounded wait ran out; the message says what was waited for, and for how long."""
