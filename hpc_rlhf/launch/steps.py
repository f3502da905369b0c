"""What the supervisor needs of a launcher: start a step, see it end, end it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hpc_rlhf.errors import ComponentError, ExitCode
from hpc_rlhf.launch.node_watch import NodeWatch


class NoNodeLeft(ComponentError):
    """A replica's node is lost, and no other one of its component has room for it."""


@dataclass(frozen=True)
class TaskDeath:
    """One task that ended abnormally by itself (not one that was ended for a peer's sake)."""

    rank: int | None  # within its step; None: not known, its node failed
    node: str | None
    exit_code: int | None = None
    signal: int | None = None
    cause: str | None = None  # what the system says beyond the signal: "out of memory"
    node_failed: bool = False  # the node was lost with all its tasks


@dataclass(frozen=True)
class StepExit:
    """How a step ended."""

    returncode: int  # 0, the exit code of the task that failed first, or 128 + its signal
    deaths: tuple[TaskDeath, ...] = ()  # in the order in which they were seen
    detail: str | None = None  # the launcher's own error, where no task is to blame


class StepHandle(Protocol):
    """A started step: all processes of one world."""

    @property
    def name(self) -> str:
        """ "learner", "sampler-0"."""

    @property
    def nodes(self) -> str:
        """Where it runs, for people."""

    @property
    def hosts(self) -> Sequence[str]:
        """Nodes to watch, those of the lower ranks first; none where they share this process's fate."""

    def poll(self) -> StepExit | None:
        """How it ended, None while any of its tasks is there. Does not block."""

    def terminate(self) -> None:
        """Ask every task to stop. Does not wait.

        The signal is SIGUSR2: srun does not pass SIGTERM on, and samplers take it for a preemption,
        during which they serve on for a while.
        """

    def kill(self) -> None:
        """Send SIGKILL to every task. Does not wait."""


class StepLauncher(Protocol):
    """Starts the steps of an attempt: local processes or ``srun`` in an allocation."""

    @property
    def job_id(self) -> str: ...

    def start(self, component: str, replica: int | None = None) -> StepHandle:
        """Start the step of ``component``, or of one of its replicas.

        Raises:
            NoNodeLeft: there is none to start the replica on.
        """

    def watch(self) -> NodeWatch:
        """Watch the nodes of the attempt."""

    def lose(self, node: str) -> None:
        """Start nothing more on ``node``."""


def peer_grace_s(first: TaskDeath) -> float:
    """Seconds that the peers of the task that ended first have before they are killed.

    They may be blocked in a collective with it, where no SIGTERM reaches Python. One that stopped on
    request agreed on that with its peers, which are about to end as well.
    """
    return 20.0 if first.exit_code == ExitCode.INTERRUPTED else 3.0


def step_name(component: str, replica: int | None) -> str:
    return component if replica is None else f"{component}-{replica}"
