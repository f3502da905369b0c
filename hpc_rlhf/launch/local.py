"""The same components as local processes: one per rank, each in a process group of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpc_rlhf.cluster.world import LOCAL_JOB, LOCAL_VARIABLES, STEP_VARIABLES
from hpc_rlhf.errors import UserError
from hpc_rlhf.launch.job_plan import JobPlan, component_command
from hpc_rlhf.launch.node_watch import NodeWatch
from hpc_rlhf.launch.steps import StepExit, TaskDeath, peer_grace_s, step_name
from hpc_rlhf.run_dir import Attempt

# Run by a small interpreter that becomes the command: Popen's preexec_fn, which could do the same, is
# unsafe beside other threads. PR_SET_PDEATHSIG is kept by exec.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the supervisor died")  # before the line above
os.execvp(sys.argv[2], sys.argv[2:])
"""


class LocalStepLauncher:
    """Starts steps as processes of this machine, whatever number of nodes the plan asks for.

    When the supervisor dies, even by SIGKILL, the kernel kills every process it started.
    """

    def __init__(self, plan: JobPlan, attempt: Attempt) -> None:
        self._plan = plan
        self._attempt = attempt
        self._gpus = _assign_gpus(plan, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self.job_id = f"{LOCAL_JOB}-{os.getpid()}"

    def watch(self) -> NodeWatch:
        return NodeWatch(())

    def lose(self, node: str) -> None:
        """Nothing to do: there is no other node than this one."""

    def start(self, component: str, replica: int | None = None) -> "LocalStep":
        """Start all ranks of a component, or the one process of a replica."""
        part = self._plan.component(component)
        size = 1 if part.replicated else part.resources.tasks
        command = component_command(self._plan, component, self._attempt.number, replica)
        name = step_name(component, replica)
        gpus = self._gpus[name]
        environment = {
            **os.environ,
            **dict(self._plan.environment),
            LOCAL_VARIABLES["size"]: str(size),
            LOCAL_VARIABLES["node"]: os.uname().nodename,
            LOCAL_VARIABLES["job_id"]: self.job_id,
            STEP_VARIABLES["component"]: component,
            STEP_VARIABLES["attempt"]: str(self._attempt.number),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        }
        processes = []
        for rank in range(size):
            rank_environment = {
                **environment,
                LOCAL_VARIABLES["rank"]: str(rank),
                LOCAL_VARIABLES["local_rank"]: str(rank),
            }
            log = self._attempt.log(component, rank if replica is None else replica)
            processes.append(_start_process(command, rank_environment, log))
        return LocalStep(name, processes)


class LocalStep:
    """The processes of one world; the first one to fail ends the others."""

    def __init__(self, name: str, processes: list[subprocess.Popen[bytes]]) -> None:
        self.name = name
        self.hosts: tuple[str, ...] = ()
        self.nodes = f"{os.uname().nodename} (pid {', '.join(str(p.pid) for p in processes)})"
        self._running = dict(enumerate(processes))
        self._deaths: list[TaskDeath] = []
        self._failed_at: float | None = None  # monotonic

    def poll(self) -> StepExit | None:
        for rank in sorted(self._running):
            code = _reap_group(self._running[rank])
            if code is None:
                continue
            del self._running[rank]
            if code != 0 and self._failed_at is None:  # later ones die in consequence
                self._deaths.append(_death(rank, code))
        if not self._running:
            return StepExit(_step_code(self._deaths), tuple(self._deaths))
        if self._deaths:
            if self._failed_at is None:
                self._failed_at = time.monotonic()
                self.terminate()
            elif time.monotonic() - self._failed_at > peer_grace_s(self._deaths[0]):
                self.kill()
        return None

    def terminate(self) -> None:
        for process in self._running.values():
            # The process alone: what it started, it ends in its own order. And not Popen's
            # send_signal, which reaps one that has ended. USR2, as under Slurm: a sampler takes
            # SIGTERM for a preemption and serves on for a while.
            os.kill(process.pid, signal.SIGUSR2)

    def kill(self) -> None:
        for process in self._running.values():
            os.killpg(process.pid, signal.SIGKILL)


def _start_process(
    command: list[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    stub = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*stub, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _reap_group(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process that ended, after killing what it left in its group."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    if os.waitid(os.P_PID, process.pid, options) is None:
        return None
    # Before it is reaped: until then no other process can be given its number.
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _death(rank: int, code: int) -> TaskDeath:
    node = os.uname().nodename
    if code < 0:
        return TaskDeath(rank, node, signal=-code)
    return TaskDeath(rank, node, exit_code=code)


def _step_code(deaths: list[TaskDeath]) -> int:
    if not deaths:
        return 0
    first = deaths[0]
    return 128 + first.signal if first.signal is not None else first.exit_code or 1


def _assign_gpus(plan: JobPlan, visible: str | None) -> dict[str, list[str]]:
    """Give every step GPUs of its own, in the order of the plan; none to one that asks for none.

    Args:
        visible: this process's CUDA_VISIBLE_DEVICES; None where all GPUs are.

    Raises:
        UserError: fewer are visible than the plan needs.
    """
    names = [gpu for gpu in visible.split(",") if gpu] if visible is not None else None
    assigned: dict[str, list[str]] = {}
    taken = 0

    def take(count: int) -> list[str]:
        nonlocal taken
        chosen = [str(i) for i in range(taken, taken + count)] if names is None else names[taken:]
        if len(chosen) < count:
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={visible}: the plan needs more than {len(names or [])} GPUs "
                "(cluster.learner and cluster.sampler, nodes x gpus_per_node)"
            )
        taken += count
        return chosen[:count]

    for component in plan.components:
        if component.replicated:
            for replica in range(component.replicas):
                assigned[step_name(component.name, replica)] = take(
                    component.replica_resources.gpus_per_node
                )
        else:
            resources = component.resources
            assigned[component.name] = take(resources.nodes * resources.gpus_per_node)
    return assigned
