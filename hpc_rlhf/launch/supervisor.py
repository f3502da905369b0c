"""The supervisor: starts one step per component, waits on all of them, and decides.

The end of a component with one world (the learner) ends the attempt. A dead replica (a sampler) is
started again in place, a bounded number of times in a row, while the learner goes on. Whatever ends
the attempt, every step is gone seconds later.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from hpc_rlhf.cluster.rendezvous import endpoint_path
from hpc_rlhf.cluster.signals import StopFlag
from hpc_rlhf.cluster.walltime import Deadline
from hpc_rlhf.cluster.world import LOCAL_JOB
from hpc_rlhf.errors import ExitCode, UserError
from hpc_rlhf.fs import publish_json, write_failure
from hpc_rlhf.launch.claim import Claim, hold, process_started
from hpc_rlhf.launch.diagnosis import (
    Diagnosis,
    diagnose,
    failure_path,
    memory_hint,
    read_failures,
    read_progress,
    read_stop,
)
from hpc_rlhf.launch.job_plan import ComponentPlan, JobPlan
from hpc_rlhf.launch.node_watch import PERIOD_S, SILENT_S, NodeWatch
from hpc_rlhf.launch.requeue import (
    QueueAgain,
    check_chain,
    conclude,
    continuation,
    find_chain,
    progress,
    queue_script_again,
)
from hpc_rlhf.launch.srun import allocation_end
from hpc_rlhf.launch.steps import (
    NoNodeLeft,
    StepExit,
    StepHandle,
    StepLauncher,
    TaskDeath,
    step_name,
)
from hpc_rlhf.observe.notices import Notices
from hpc_rlhf.run_dir import Attempt

POLL_S = 0.05
STOP_GRACE_S = 10.0  # from asking a step to stop to SIGKILL when an attempt ends
KILL_WAIT_S = 10.0  # then the job's or the supervisor's own end takes what is left
NODES_HEARD_S = SILENT_S + 2 * PERIOD_S  # until each has answered again, or is lost
ENDING_S = STOP_GRACE_S + 5.0  # of the walltime, kept for ending the steps and for the requeue
STOPPED_RESTART_DELAY_S = 10.0  # a replica that was asked to stop: the learner is about to be, too


MakeLauncher = Callable[[JobPlan, Attempt], StepLauncher]


def run_attempt(plan: JobPlan, make_launcher: MakeLauncher) -> ExitCode:
    """Work on the run from the main thread of this process; see :func:`work_on`."""
    flag = StopFlag()
    with flag.installed(("TERM", "INT", "USR2", plan.signal)):
        return work_on(plan, make_launcher, flag, queue_script_again).exit_code


def work_on(
    plan: JobPlan, make_launcher: MakeLauncher, flag: StopFlag, queue_again: QueueAgain
) -> Diagnosis:
    """Claim the run, supervise its next attempt, and let the run go on after it.

    Args:
        queue_again: how a successor of this job is queued, where the plan asks for one.

    Returns:
        Why the attempt ended; ``final`` unless the run goes on by itself.

    Raises:
        UserError: another attempt works on the run, and nothing was written; or the allocation
            does not fit the plan.
    """
    after = continuation(plan, queue_again, os.environ)
    with hold(plan.run) as claim:
        chain = find_chain(plan.run, os.environ.get("SLURM_JOB_ID", f"{LOCAL_JOB}-{os.getpid()}"))
        refusal = check_chain(plan, chain)
        if refusal is not None:
            print(refusal.reason, file=sys.stderr)
            return refusal
        attempt = plan.run.new_attempt()
        claim.name_attempt(attempt.number)
        with EventLog(attempt.path / "logs" / "supervisor.log") as log:
            _note(log, after.begin(attempt))
            try:
                launcher = make_launcher(plan, attempt)
                ending = supervise(plan, attempt, launcher, flag, claim, chain.name)
            except UserError:
                _note(log, after.stop())
                raise
    # the claim is free: from here on, the next attempt may begin at any moment
    with EventLog(attempt.path / "logs" / "supervisor.log") as log:
        if ending.final:
            _note(log, after.stop())
            if ending.exit_code is ExitCode.INTERRUPTED:
                log(f"the same command resumes {plan.run_dir}")
            return ending
        goes_on, how = after.go_on(ending.lost_nodes)
        _note(log, how)
    return replace(ending, final=not goes_on)


def _note(log: "EventLog", message: str | None) -> None:
    if message:
        log(message)


def supervise(
    plan: JobPlan,
    attempt: Attempt,
    launcher: StepLauncher,
    flag: StopFlag,
    claim: Claim,
    chain: str | None = None,
) -> Diagnosis:
    """Run one attempt to its end and write ``ended.json``.

    Every event is a line on stderr and in ``logs/supervisor.log``; the last one is the reason.

    Args:
        claim: on the run; lost, it ends the attempt.
        chain: name of the chain of attempts that this one belongs to; default: its job's id.

    Returns:
        Why it ended, with the exit code: DONE when the learner completed; INTERRUPTED when it
        stopped on request, its state durable; BAD_INPUT when it refused its input; else FAILED.
    """
    end_time = allocation_end(os.environ, _process_start())
    is_past = end_time is not None and end_time <= time.time()
    if is_past:  # of an allocation that is there: this node's clock is wrong
        end_time = None
    deadline = Deadline(end_time, margin_s=min(ENDING_S, plan.signal_delay_s / 4))
    publish_json(attempt.plan, plan.to_json())
    publish_json(
        attempt.started,
        {
            "job_id": launcher.job_id,
            "chain": chain or launcher.job_id,
            "progress": progress(plan.run),
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "time": time.time(),
            "end_time": end_time,
        },
    )
    with EventLog(attempt.path / "logs" / "supervisor.log") as log:
        if is_past:
            log(
                "by this node's clock the allocation, which has just begun, is over: the walltime is "
                f"not known, {plan.signal} will come {plan.signal_delay_s} s before its end"
            )
        return _Supervisor(plan, attempt, launcher, flag, claim, log, deadline).run()


def _process_start() -> float:
    """Unix time at which this process began: the job script, which has become it by exec."""
    started = process_started(os.getpid())
    assert started is not None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return time.time() - age


class EventLog:
    """One line an event: to a file with its time, and to stderr."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __call__(self, message: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n"
        try:
            self._file.write(line)
        except OSError as error:  # a full disk must not keep the supervisor from ending the steps
            line = f"{line.rstrip()} (not in supervisor.log: {error})\n"
        sys.stderr.write(line)
        sys.stderr.flush()


@dataclass
class _Step:
    """A step that is to run: the world of a component, or one of its replicas."""

    component: ComponentPlan
    replica: int | None
    handle: StepHandle | None = None
    started: float = 0.0  # monotonic
    start_again_at: float | None = None  # monotonic
    deaths_in_row: int = 0
    home: Sequence[str] | None = None  # its first nodes
    hosts: Sequence[str] = ()  # its latest ones
    given_up: bool = False

    @property
    def name(self) -> str:
        return step_name(self.component.name, self.replica)

    @property
    def nodes(self) -> list[str]:
        """Of its ranks, in rank order."""
        resources = self.component.resources
        hosts = self.hosts or [os.uname().nodename] * resources.nodes
        return [host for host in hosts for _ in range(resources.tasks_per_node)]

    def end_by_loss_of(self, node: str) -> StepExit:
        rank = list(self.hosts).index(node) * self.component.resources.tasks_per_node
        death = TaskDeath(rank, node, node_failed=True)
        return StepExit(128 + signal.SIGKILL, (death,))


class _Supervisor:
    def __init__(
        self,
        plan: JobPlan,
        attempt: Attempt,
        launcher: StepLauncher,
        flag: StopFlag,
        claim: Claim,
        log: EventLog,
        deadline: Deadline,
    ) -> None:
        self._plan = plan
        self._attempt = attempt
        self._launcher = launcher
        self._flag = flag
        self._claim = claim
        self._log = log
        self._deadline = deadline
        self._lost: set[str] = set()  # nodes
        self._dying: list[StepHandle] = []  # of steps on lost nodes, which may be in no hurry
        self._notices = Notices(attempt)
        self._steps = [
            _Step(component, replica)
            for component in plan.components
            for replica in (range(component.replicas) if component.replicated else [None])
        ]

    def run(self) -> Diagnosis:
        self._log(
            f"attempt {self._attempt.number}: job {self._launcher.job_id}, supervisor on "
            f"{os.uname().nodename}, pid {os.getpid()}"
        )
        try:
            ending = self._watch()
        except BaseException as error:
            self._end_all()
            ending = Diagnosis(
                f"the supervisor failed: {type(error).__name__}: {error}",
                ExitCode.FAILED,
                component="supervisor",
                node=os.uname().nodename,
            )
            self._finish(ending)
            raise
        self._end_all()
        self._repeat(self._notices.new())
        by_user = any(name == "SIGINT" for name, _ in self._flag.seen)
        ending = conclude(self._plan, self._attempt, ending, by_user=by_user)
        ending = replace(ending, lost_nodes=tuple(sorted(self._lost)))
        self._finish(ending)
        return ending

    def _watch(self) -> Diagnosis:
        """Start every step; return why the attempt ends."""
        with closing(self._launcher.watch()) as nodes:
            for step in self._steps:
                self._start(step)
            return self._watch_steps(nodes)

    def _watch_steps(self, nodes: NodeWatch) -> Diagnosis:
        drain_s = 0.0
        drain_until: float | None = None
        while True:
            for node in nodes.lost():
                ending = self._node_lost(node) if node not in self._lost else None
                if ending is not None:
                    return ending
            self._dying = [handle for handle in self._dying if handle.poll() is None]
            for step in self._steps:
                ended = step.handle.poll() if step.handle else None
                if ended is not None:
                    step.handle = None
                    ending = self._ended(step, ended)
                    if ending is not None and ending.of_a_peer:
                        return self._lost_with_node(step, nodes) or ending
                    if ending is not None:
                        return ending
            self._repeat(self._notices.poll())
            lost = self._beat()
            if lost is not None:
                return lost
            if self._flag.requested:
                if drain_until is None:
                    # the steps must be gone, and the requeue asked for, before the walltime is over
                    drain_s = max(0.0, min(self._plan.signal_delay_s, self._deadline.left_s))
                    drain_until = time.monotonic() + drain_s
                    self._ask_to_stop()
                elif time.monotonic() >= drain_until:
                    return self._interrupted(f"was not done within {drain_s:.0f} s")
                elif sum(name == "SIGINT" for name, _ in self._flag.seen) > 1:
                    return self._interrupted("was not waited for (second Ctrl-C)")
            else:
                ending = self._start_again()
                if ending is not None:
                    return ending
            time.sleep(POLL_S)

    def _repeat(self, notices: Iterable[str]) -> None:
        for notice in notices:
            self._log(f"learner: {notice}")

    def _beat(self) -> Diagnosis | None:
        """Keep the claim; return why the attempt ends if it was lost."""
        try:
            taken_by = self._claim.beat()
        except OSError as error:
            self._log(f"the claim on the run cannot be refreshed: {error}")
            return None
        if taken_by is None:
            return None
        return Diagnosis(
            f"the run was taken over ({taken_by}): this supervisor was not heard of for so long "
            "that it was taken for dead",
            ExitCode.FAILED,
            component="supervisor",
            node=os.uname().nodename,
            final=True,
        )

    def _start(self, step: _Step) -> None:
        step.handle = self._launcher.start(step.component.name, step.replica)
        step.hosts = step.handle.hosts
        step.home = step.home or step.hosts
        step.started = time.monotonic()
        step.start_again_at = None
        self._log(f"{step.name}: started on {step.handle.nodes}")

    def _start_again(self) -> Diagnosis | None:
        for step in self._steps:
            if step.start_again_at is not None and time.monotonic() >= step.start_again_at:
                try:
                    self._start(step)
                except NoNodeLeft as error:
                    return self._give_up(step, str(error))
        return None

    def _give_up(self, step: _Step, why: str) -> Diagnosis | None:
        """Go on without a replica whose node is lost; return why the attempt ends if it is the last."""
        step.start_again_at, step.given_up = None, True
        name = step.component.name
        left = sum(s.component is step.component and not s.given_up for s in self._steps)
        if left == 0:
            return Diagnosis(f"no {name} is left: {why}", ExitCode.INTERRUPTED, component=name)
        self._log(f"{step.name}: given up, {why}; the attempt goes on with {left} {name}(s)")
        return None

    def _node_lost(self, node: str) -> Diagnosis | None:
        """End what runs on a node that is gone; return why the attempt ends, None if it goes on."""
        self._note_lost(node)
        for step in self._steps:
            if step.handle is None or node not in step.hosts:
                continue
            step.handle.kill()
            self._dying.append(step.handle)
            step.handle = None
            ending = self._ended(step, step.end_by_loss_of(node))
            if ending is not None:
                return ending
        return None

    def _lost_with_node(self, step: _Step, nodes: NodeWatch) -> Diagnosis | None:
        """Why a step ended of which its tasks only know that a connection broke; None: not by a node.

        A node that is lost can reset its connections long before it counts as lost. So every node
        is heard first, or found lost.
        """
        since = time.monotonic()
        while not nodes.all_answered(since) and time.monotonic() < since + NODES_HEARD_S:
            lost = set(nodes.lost())
            for node in lost - self._lost:
                self._note_lost(node)
            for node in step.hosts:
                if node in lost:
                    return self._ended(step, step.end_by_loss_of(node))
            time.sleep(POLL_S)
        return None

    def _note_lost(self, node: str) -> None:
        self._lost.add(node)
        self._launcher.lose(node)
        self._log(f"{node} is lost: down or cut off, it has not answered for {SILENT_S:g} s")

    def _ask_to_stop(self) -> None:
        self._log(f"{self._flag.reason}: asked the learner to stop at its next save point")
        for step in self._steps:
            if not step.component.replicated and step.handle is not None:
                step.handle.terminate()

    def _interrupted(self, how: str) -> Diagnosis:
        progress = read_progress(self._attempt)
        return Diagnosis(
            f"{self._flag.reason}; the learner {how} and is ended, its last checkpoint stands",
            ExitCode.INTERRUPTED,
            component="learner",
            phase=progress.phase,
            step=progress.step,
        )

    def _ended(self, step: _Step, ended: StepExit) -> Diagnosis | None:
        """Handle a step's end; return why the attempt ends, None if it goes on."""
        if step.replica is not None:
            return self._replica_ended(step, step.replica, ended)
        name = step.component.name
        progress = read_progress(self._attempt)
        if ended.returncode == 0:
            return Diagnosis(f"{name} completed", ExitCode.DONE, component=name, step=progress.step)
        records = read_failures(self._attempt, name)
        asked_by = read_stop(self._attempt) or self._flag.reason
        ending = diagnose(name, ended, records, progress, nodes=step.nodes, asked_by=asked_by)
        reason = ending.reason
        if ending.exit_code is ExitCode.FAILED and not records and ending.rank is not None:
            reason += f"; see {self._attempt.log(name, ending.rank)}"
        if ending.exit_code is ExitCode.FAILED and ending.killed:
            reason += f"; {memory_hint(self._launcher.job_id)}"
        return replace(ending, reason=reason)

    def _replica_ended(self, step: _Step, replica: int, ended: StepExit) -> Diagnosis | None:
        component = step.component
        records = read_failures(self._attempt, component.name)
        own = {0: records[replica]} if replica in records else {}
        death = diagnose(component.name, ended, own, read_progress(self._attempt), replica=replica)
        # neither is of the next incarnation: nobody may take them for its own
        endpoint_path(self._attempt, component.name, replica).unlink(missing_ok=True)
        record = failure_path(self._attempt, component.name, replica)
        if record.exists():
            record.rename(record.with_suffix(f".{time.time():.0f}.dead"))

        if death.exit_code is ExitCode.BAD_INPUT:
            return death
        if self._flag.requested:
            self._log(f"{death.reason}; not started again, the attempt is being stopped")
            return None
        lost = [task.node for task in ended.deaths if task.node_failed and task.node]
        if lost:
            self._lost.update(lost)
            for node in lost:
                self._launcher.lose(node)
            step.start_again_at = time.monotonic()
            self._log(f"{death.reason}; to be started on another node, if one has room")
            return None
        if step.hosts != step.home and not ended.deaths:  # it was not even created there
            return self._give_up(step, death.reason)
        lived = time.monotonic() - step.started
        step.deaths_in_row = 1 if lived >= component.restart_reset_s else step.deaths_in_row + 1
        if step.deaths_in_row > component.max_restarts:
            reason = (
                f"{death.reason}: death {step.deaths_in_row} in a row, "
                f"{component.max_restarts} restarts are allowed; "
                f"see {self._attempt.log(component.name, replica)}"
            )
            if death.killed:
                reason += f"; {memory_hint(self._launcher.job_id)}"
            return replace(death, reason=reason, exit_code=ExitCode.FAILED)
        asked = death.exit_code == ExitCode.INTERRUPTED
        delay = STOPPED_RESTART_DELAY_S if asked else 0.0
        step.start_again_at = time.monotonic() + delay
        self._log(
            f"{death.reason}; restart {step.deaths_in_row} of {component.max_restarts} in a row"
            + (f", in {delay:g} s" if delay else "")
        )
        return None

    def _end_all(self) -> None:
        """End what is left: ask it to stop, and SIGKILL what does not."""
        began = time.monotonic()
        self._signal_all("terminate")
        if not self._all_ended(STOP_GRACE_S):
            self._log(
                f"killing {self._running()}: still there {STOP_GRACE_S:g} s after being asked to stop"
            )
            self._signal_all("kill")
            if not self._all_ended(KILL_WAIT_S):
                self._log(f"{self._running()} still there {KILL_WAIT_S:g} s after SIGKILL")
        self._log(f"all steps ended in {time.monotonic() - began:.1f} s")

    def _signal_all(self, how: str) -> None:
        for step in self._steps:
            if step.handle is not None:
                getattr(step.handle, how)()

    def _all_ended(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while True:
            for step in self._steps:
                if step.handle is not None and step.handle.poll() is not None:
                    step.handle = None
            self._dying = [handle for handle in self._dying if handle.poll() is None]
            if not self._running():
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)

    def _running(self) -> str:
        running = [step.name for step in self._steps if step.handle is not None]
        return ", ".join([*running, *(f"{handle.name} on a lost node" for handle in self._dying)])

    def _finish(self, ending: Diagnosis) -> None:
        try:
            publish_json(
                self._attempt.ended,
                {
                    **asdict(ending),
                    "exit_code": int(ending.exit_code),
                    "signals": self._flag.seen,
                    "time": time.time(),
                },
            )
        except OSError as error:  # what follows must go on: the requeue, the claim
            self._log(f"the end is not recorded: {write_failure(error, self._attempt.path)}")
        self._log(f"{ending.reason}; attempt {self._attempt.number} ends")
