"""Slurm steps: starting them with ``srun`` in an allocation, and reading from srun who died."""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rlhf.cluster.walltime import by_this_clock
from hpc_rlhf.cluster.world import LOCAL_VARIABLES, STEP_VARIABLES
from hpc_rlhf.config import Het
from hpc_rlhf.errors import ComponentError, UserError
from hpc_rlhf.launch.job_plan import JobPlan, Resources, component_command
from hpc_rlhf.launch.node_watch import NodeWatch
from hpc_rlhf.launch.sbatch import has_own_gpu_request, is_heterogeneous
from hpc_rlhf.launch.steps import NoNodeLeft, StepExit, TaskDeath, peer_grace_s, step_name
from hpc_rlhf.run_dir import Attempt

KILL_GRACE_S = 3.0  # from SIGTERM to srun, which kills its tasks, to SIGKILL
STEP_CREATION_S = 120  # srun gives up when the nodes of the allocation stay busy for so long
MOVED_CREATION_S = 10  # ... of a replica whose node is lost, on another one, which may have no room
COMMAND_TIMEOUT_S = 60.0  # of squeue and scontrol

# What the job's own options leave in its environment, and srun would read as options of a step:
# the whole job's memory, tasks and GPUs for every step, or (SLURM_TRES_PER_TASK, since 24.05) a
# value that contradicts --cpus-per-task.
_SIZING_VARIABLES = (
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_CPUS_PER_GPU",
    "SLURM_MEM_PER_",
    "SLURM_GPUS",
    "SLURM_TRES_PER_TASK",
    "SLURM_THREADS_PER_CORE",
    "SLURM_EXPORT_ENV",
)


def in_allocation(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs inside a Slurm job."""
    return "SLURM_JOB_ID" in environ


class SlurmStepLauncher:
    """Starts steps with ``srun`` in the allocation of this process.

    Raises:
        UserError: the allocation does not fit the plan.
    """

    def __init__(self, plan: JobPlan, attempt: Attempt) -> None:
        self._plan = plan
        self._attempt = attempt
        self._nodes = component_nodes(plan, os.environ)
        self._lost: set[str] = set()
        self.job_id = os.environ["SLURM_JOB_ID"]

    def watch(self) -> NodeWatch:
        nodes = [node for nodes in self._nodes.values() for node in nodes]
        return NodeWatch(nodes, confirm_port=slurmd_port())

    def lose(self, node: str) -> None:
        self._lost.add(node)

    def start(self, component: str, replica: int | None = None) -> "SrunStep":
        nodes = self._nodes[component]
        patience_s = STEP_CREATION_S
        if replica is not None:
            per_node = self._plan.component(component).resources.tasks_per_node
            node = choose_node(nodes, replica // per_node, self._lost)
            if node is None:
                raise NoNodeLeft(
                    f"all nodes of {component} are lost: {', '.join(sorted(self._lost))}"
                )
            if node != nodes[replica // per_node]:
                patience_s = MOVED_CREATION_S
            nodes = [node]
        name = step_name(component, replica)
        command = [
            "srun",
            *srun_options(self._plan, component, replica, nodes, patience_s),
            *_logged(self._attempt, component, replica),
            *component_command(self._plan, component, self._attempt.number, replica),
        ]
        log = self._attempt.path / "logs" / f"{name}-srun.log"
        with log.open("ab") as output:
            offset = output.tell()
            process = subprocess.Popen(
                command,
                env=self._environment(component),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return SrunStep(name, nodes, process, log, offset)

    def _environment(self, component: str) -> dict[str, str]:
        return {
            **step_environment(os.environ),
            **dict(self._plan.environment),
            STEP_VARIABLES["component"]: component,
            STEP_VARIABLES["attempt"]: str(self._attempt.number),
        }


def choose_node(nodes: Sequence[str], home: int, lost: Collection[str]) -> str | None:
    """The node of a replica: the one it was planned for, else the next that is not lost."""
    turned = (*nodes[home:], *nodes[:home])
    return next((node for node in turned if node not in lost), None)


def srun_options(
    plan: JobPlan,
    component: str,
    replica: int | None,
    nodes: Sequence[str],
    patience_s: int = STEP_CREATION_S,
) -> list[str]:
    """Options of one step, every one of its sizes said: what srun inherits differs by version.

    Args:
        nodes: the step's nodes, one for a replica.
        patience_s: for how long srun waits for resources of the allocation to be free.
    """
    part = plan.component(component)
    resources = part.resources if replica is None else part.replica_resources
    options = [
        f"--job-name={step_name(component, replica)}",
        f"--nodes={resources.nodes}",
        f"--ntasks={resources.tasks}",
        f"--ntasks-per-node={resources.tasks_per_node}",
        f"--cpus-per-task={resources.cpus_per_task}",
        "--exact",  # no more than that, other steps share the node
        # 0: the job's limit, of which the step takes no share that another one would wait for
        f"--mem={f'{resources.mem_per_node_mb}M' if resources.mem_per_node_mb else 0}",
        *_gpu_options(plan, resources),
        "--kill-on-bad-exit=1",
        "--wait=0",  # a site's WaitTime would end the tasks that are not done soon after the first
        f"--immediate={patience_s}",
        "--input=none",
        "--mpi=none",  # whatever the site's MpiDefault is: nothing here is an MPI program
        "--export=ALL",
    ]
    if is_heterogeneous(plan):
        options.append(f"--het-group={plan.group(component)}")
    if replica is not None:
        # by name: Slurm takes a lost node out of the allocation, and counts anew
        options.append(f"--nodelist={nodes[0]}")
    elif plan.het == Het.STEPS:
        before = sum(p.resources.nodes for p in plan.components[: plan.group(component)])
        options.append(f"--relative={before}")
    return options


def _logged(attempt: Attempt, component: str, replica: int | None) -> list[str]:
    """A shell that becomes the task's command, with the output in the log of its rank.

    Not by ``--output``: srun learns of a task's death only when the last process that holds the
    task's output is gone, which may be a child that outlived it. And what passes through srun is
    lost with the batch host.
    """
    if replica is not None:
        return ["/bin/sh", "-c", 'exec "$@" >>"$0" 2>&1', str(attempt.log(component, replica))]
    logs = str(attempt.log(component, 0)).removesuffix("0.log")
    return ["/bin/sh", "-c", 'exec "$@" >>"$0$SLURM_PROCID.log" 2>&1', logs]


def _gpu_options(plan: JobPlan, resources: Resources) -> list[str]:
    if resources.gpus_per_node:
        # of the node, not of the task: a rank that sees only its own GPU cannot reach its peers'
        return [f"--gpus-per-node={resources.gpus_per_node}"]
    others_have_some = any(component.resources.gpus_per_node for component in plan.components)
    if plan.het == Het.STEPS and others_have_some and not has_own_gpu_request(resources.extra):
        return ["--gres=none"]  # else it would hold the GPUs of its nodes
    return []


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for srun: the job's, without what would shape or rename the step."""
    local = (*LOCAL_VARIABLES.values(), *STEP_VARIABLES.values())
    return {
        name: value
        for name, value in environ.items()
        if name not in local and ("_HET_GROUP_" in name or not name.startswith(_SIZING_VARIABLES))
    }


class SrunStep:
    """A step that ``srun`` waits for."""

    def __init__(
        self,
        name: str,
        hosts: Sequence[str],
        process: subprocess.Popen[bytes],
        log: Path,
        offset: int,
    ) -> None:
        self.name = name
        self.hosts = hosts
        self.nodes = f"{','.join(hosts)} (srun pid {process.pid})"
        self._process = process
        self._log = log
        self._offset = offset  # where this step's part of the log begins
        self._size = offset
        # both monotonic: when the peers of a dead task will have had their time, and when they had
        self._kill_at: float | None = None
        self._killed_at: float | None = None

    def poll(self) -> StepExit | None:
        returncode = self._process.poll()
        if returncode is not None:
            return parse_srun(self._output(), returncode)
        if self._killed_at is not None:
            self.kill()
        elif self._kill_at is None:
            self._watch_for_death()
        elif time.monotonic() > self._kill_at:
            # --kill-on-bad-exit gives the peers the site's KillWait, which may be minutes
            self.kill()
        return None

    def terminate(self) -> None:
        # srun passes USR2 on to every task; on SIGTERM it kills them instead
        self._process.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        if self._killed_at is None:
            self._killed_at = time.monotonic()
            self._process.send_signal(signal.SIGTERM)
        elif time.monotonic() - self._killed_at > KILL_GRACE_S:
            # it hangs; its own watchdog process ends the step when it is gone
            self._process.kill()

    def _watch_for_death(self) -> None:
        size = self._log.stat().st_size
        if size != self._size:
            self._size = size
            deaths = parse_srun(self._output(), 1).deaths
            if deaths:
                self._kill_at = time.monotonic() + peer_grace_s(deaths[0])

    def _output(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._offset)
            return file.read().decode(errors="replace")


def component_nodes(plan: JobPlan, environ: Mapping[str, str]) -> dict[str, list[str]]:
    """The nodes of each component in the allocation of this process.

    Raises:
        UserError: the allocation has another shape than the plan.
    """
    groups = int(environ.get("SLURM_HET_SIZE", "1"))
    expected = len(plan.components) if is_heterogeneous(plan) else 1
    if groups != expected:
        raise UserError(
            f"job {environ['SLURM_JOB_ID']} has {groups} het component(s), the plan needs "
            f"{expected} (cluster.het={plan.het}): give the job script the components of the "
            "configuration, or cluster.het the form of the job"
        )
    names = [component.name for component in plan.components]
    if expected > 1:
        found = {
            name: _expand(environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"])
            for group, name in enumerate(names)
        }
    else:
        rest = _expand(environ["SLURM_JOB_NODELIST"])
        found = {}
        for component in plan.components:
            count = component.resources.nodes
            found[component.name], rest = rest[:count], rest[count:]
    for component in plan.components:
        have, need = len(found[component.name]), component.resources.nodes
        if have < need:
            raise UserError(
                f"cluster.{component.name}.nodes={need}: job {environ['SLURM_JOB_ID']} has only "
                f"{have} node(s) for it"
            )
    return found


def _expand(node_list: str) -> list[str]:
    return slurm_command(["scontrol", "show", "hostnames", node_list]).split()


class CommandKilled(ComponentError):
    """A command of Slurm's was killed, and may have done its work."""


def slurm_command(command: list[str]) -> str:
    """Run a command of Slurm's.

    Raises:
        CommandKilled: a signal ended it.
        ComponentError: it failed or did not answer; the message has what it said.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},  # whatever the user reads best
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ComponentError(f"{shlex.join(command)}: {error}") from error
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise CommandKilled(f"{shlex.join(command)}: was killed by {name}")
    if done.returncode != 0:
        raise ComponentError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class JobLine:
    """One line of squeue or sacct: a job, or one component of a heterogeneous one."""

    job_id: str  # 12, or 12+0
    state: str  # PENDING, RUNNING, COMPLETED, CANCELLED by 1000, ...
    note: str = ""  # why it waits and until when, where it runs, how it ended

    def __str__(self) -> str:
        return " ".join(part for part in (self.job_id, self.state, self.note) if part)


def queue_lines(job_id: str) -> list[JobLine]:
    """What squeue says of a job's components; empty when it no longer knows the job.

    Raises:
        ComponentError: Slurm did not answer.
    """
    command = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%i|%T|%r|%S|%N"]
    try:
        return parse_squeue(slurm_command(command))
    except ComponentError as error:
        if "Invalid job id" in str(error):
            return []
        raise


def queue_states(job_id: str) -> list[str]:
    """The states of :func:`queue_lines`."""
    return [line.state for line in queue_lines(job_id)]


def parse_squeue(text: str) -> list[JobLine]:
    """Read ``squeue --noheader --format=%i|%T|%r|%S|%N``."""
    lines = []
    for line in text.splitlines():
        job_id, state, reason, start, nodes = line.strip().split("|")
        if state == "PENDING":
            expected = "" if start in ("N/A", "Unknown", "") else f", expected to start {start}"
            lines.append(JobLine(job_id, state, f"({reason}{expected})"))
        else:
            lines.append(JobLine(job_id, state, f"on {nodes}" if nodes else ""))
    return sorted(lines, key=lambda line: line.job_id)


def accounted_lines(job_id: str) -> list[JobLine]:
    """What Slurm's accounting says of a job that is over; empty where there is none."""
    columns = "--format=JobID,State,ExitCode"
    options = ["--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", columns]
    try:
        return parse_sacct(slurm_command(["sacct", *options]))
    except ComponentError:  # many sites have no accounting, and some keep it from users
        return []


def parse_sacct(text: str) -> list[JobLine]:
    """Read ``sacct --noheader --parsable2 --format=JobID,State,ExitCode``."""
    lines = []
    for line in text.splitlines():
        job_id, state, exit_code = line.strip().split("|")
        code, _, signal_number = exit_code.partition(":")
        ended = f"signal {signal_number}" if signal_number not in ("", "0") else f"exit code {code}"
        lines.append(JobLine(job_id, state, "" if exit_code == "0:0" else f"({ended})"))
    return sorted(lines, key=lambda line: line.job_id)


def slurmd_port() -> int | None:
    """Where the nodes' slurmd listen; None if Slurm does not say."""
    try:
        text = slurm_command(["scontrol", "show", "config"])
    except ComponentError:
        return None
    match = re.search(r"^SlurmdPort\s*=\s*(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class JobRecord:
    """What the controller says of a job (of the leader, of a heterogeneous one)."""

    state: str  # RUNNING, COMPLETING, PENDING, CANCELLED, ...
    reason: str = "None"  # of that state: TimeLimit, Dependency, ...
    restarts: int = 0
    start_time: str | None = None  # this and the next: in this node's local time, or "Unknown"
    end_time: str | None = None  # of its time limit

    @property
    def holds_nodes(self) -> bool:
        """Whether processes of it may be there."""
        return self.state in (
            *("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING"),
            *("STAGE_OUT", "RESIZING"),
        )


GONE = JobRecord("GONE")
"""A job that the controller has forgotten, minutes after its end."""


def job_record(job_id: str) -> JobRecord:
    """Ask the controller about a job.

    Raises:
        ComponentError: it did not answer.
    """
    try:
        return parse_job(slurm_command(["scontrol", "--oneliner", "show", "job", job_id]))
    except ComponentError as error:
        if "Invalid job id" in str(error):
            return GONE
        raise


def allocation_end(environ: Mapping[str, str], script_start: float) -> float | None:
    """Unix time, by this node's clock, at which the job of this process reaches its time limit.

    None outside of a job, without a limit, and where Slurm (before 23.02, which set no variable)
    does not answer.

    Args:
        script_start: when the job script began, by this node's clock.
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    start: float | None = None
    if "SLURM_JOB_END_TIME" in environ:
        end: float | None = float(environ["SLURM_JOB_END_TIME"])
        if "SLURM_JOB_START_TIME" in environ:
            start = float(environ["SLURM_JOB_START_TIME"])
    else:
        try:
            job = job_record(environ["SLURM_JOB_ID"])
        except ComponentError:
            return None
        start, end = parse_time(job.start_time), parse_time(job.end_time)
    return None if end is None else by_this_clock(end, job_start=start, script_start=script_start)


def parse_time(text: str | None) -> float | None:
    """Unix time of one that Slurm printed in the local time of this process, None if it is none."""
    if text in (None, "Unknown", "N/A", "NONE"):
        return None
    return time.mktime(time.strptime(str(text), "%Y-%m-%dT%H:%M:%S"))


def parse_job(text: str) -> JobRecord:
    """Read the first line of ``scontrol --oneliner show job``: a het job's leader."""
    line = text.splitlines()[0]
    fields = dict(re.findall(r"(?:^| )(JobState|Reason|Restarts|StartTime|EndTime)=(\S+)", line))
    return JobRecord(
        fields["JobState"],
        fields.get("Reason", "None"),
        int(fields.get("Restarts", 0)),
        fields.get("StartTime"),
        fields.get("EndTime"),
    )


_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}
# srun: error: node2: task 1: Killed
# srun: error: node[1-2]: tasks 0-3: Exited with exit code 75
_TASKS = re.compile(r"^srun: error: (?P<host>[^\s:]+): tasks? (?P<first>\d+)[-,\d]*: (?P<how>.+)$")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (?P<host>[^\s:]+)")
# what srun prints when it begins to end the other tasks: who dies after it is no culprit
_ENDING = re.compile(r"^(srun: (\S+: )*Terminating |slurmstepd\S*: error: \*\*\* STEP )")
_SRUN_TOLD_TO_END = "srun: forcing job termination"


def parse_srun(text: str, returncode: int) -> StepExit:
    """Read who died from what ``srun --kill-on-bad-exit`` wrote to its stderr.

    Args:
        text: its output; lines of other kinds, the tasks' own among them, are passed over.
        returncode: of the srun process, negative where a signal killed srun itself.
    """
    if returncode == 0:
        return StepExit(0)
    deaths: list[TaskDeath] = []
    errors: list[str] = []
    for line in text.splitlines():
        if _ENDING.match(line) and deaths:
            break
        if line.startswith(_SRUN_TOLD_TO_END) and not deaths:
            # scancel, or the end of the grace time: Slurm signals srun, too
            return StepExit(128 + signal.SIGTERM, detail="its srun was told to end")
        if line.startswith("srun: error: "):
            errors.append(line.removeprefix("srun: error: "))
        if match := _TASKS.match(line):
            death = _task_death(_first_host(match["host"]), int(match["first"]), match["how"])
            if death is not None:
                deaths.append(death)
        elif match := _NODE_FAILURE.match(line):
            deaths.append(TaskDeath(None, _first_host(match["host"]), node_failed=True))
    if deaths:
        first = deaths[0]
        if first.exit_code is not None:
            returncode = first.exit_code
        elif first.signal is not None:
            returncode = 128 + first.signal
        return StepExit(returncode, tuple(deaths))
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return StepExit(128 - returncode, detail=f"its srun was killed by {name}")
    return StepExit(returncode, detail=f"srun: {errors[0]}" if errors else None)


def _task_death(node: str, rank: int, how: str) -> TaskDeath | None:
    if match := _EXIT_CODE.match(how):
        return TaskDeath(rank, node, exit_code=int(match[1]))
    how = how.removesuffix(" (core dumped)").strip()
    if how == "Out Of Memory":
        return TaskDeath(rank, node, signal=signal.SIGKILL, cause="out of memory")
    if how in _SIGNALS:
        return TaskDeath(rank, node, signal=int(_SIGNALS[how]))
    return None


def _first_host(hosts: str) -> str:
    """The first name of a host list: "node[1-2,7]" -> "node1"."""
    return re.sub(r"\[([^\],-]+)[^\]]*\].*", r"\1", hosts)
