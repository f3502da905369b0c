"""Entry point of every process of an attempt.

``python -m hpc_rlhf.launch.component learner|sampler --run RUN --attempt N [--replica K]``, started
by the supervisor under its :class:`~hpc_rlhf.launch.supervisor.StepLauncher`.
"""

import argparse
import contextlib
import faulthandler
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from hpc_rlhf import compose
from hpc_rlhf.cluster.world import World
from hpc_rlhf.errors import ComponentError, ExitCode, UserError
from hpc_rlhf.fs import UNWRITABLE, publish_json, read_json, system_error, write_failure
from hpc_rlhf.launch.job_plan import LEARNER, SAMPLER, JobPlan
from hpc_rlhf.observe.startup import IMPORTS, StartUp, importing
from hpc_rlhf.observe.timeline import Timeline
from hpc_rlhf.run_dir import Attempt, RunDir


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one process of a component; its output goes to its own log, its failure to a record."""
    parser = argparse.ArgumentParser(prog="hpc_rlhf.launch.component")
    parser.add_argument("component", choices=(LEARNER, SAMPLER))
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--replica", type=int)
    arguments = parser.parse_args(argv)

    run = RunDir(arguments.run)
    attempt = run.attempt(arguments.attempt)
    world = World.from_environment()
    console = os.dup(2)  # the launcher's, beside the log
    rank = world.rank if arguments.replica is None else arguments.replica
    _redirect_output(attempt.log(arguments.component, rank))
    _log_to_stderr()
    coordinates = arguments.component == LEARNER and rank == 0
    timeline = Timeline(
        attempt if coordinates else None, StartUp(float(read_json(attempt.started)["time"]))
    )
    timeline.part(IMPORTS)  # from here on one can see that it lives
    try:
        code = _run(arguments.component, run, attempt, world, arguments.replica, timeline)
    except BaseException as error:  # noqa: BLE001 - recorded, then the process ends with it
        code = ExitCode.BAD_INPUT if isinstance(error, UserError) else ExitCode.FAILED
        _record_failure(attempt, arguments.component, rank, world, timeline, error, console)
    with contextlib.suppress(OSError):  # a full disk takes no log either
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: a thread blocked in a collective with a dead peer would keep the process.
    os._exit(code)


def _run(
    component: str,
    run: RunDir,
    attempt: Attempt,
    world: World,
    replica: int | None,
    timeline: Timeline,
) -> ExitCode:
    config = compose.load(run.config)
    plan = JobPlan.from_json(read_json(attempt.plan))
    if component == LEARNER:
        with importing():
            from hpc_rlhf.cluster import device

            device.import_megatron()
            if config.stage.is_offline:
                from hpc_rlhf.stages.offline import run_learner
            else:
                from hpc_rlhf.stages.online import run_learner
        return run_learner(config, plan, attempt, world, timeline)
    with importing():
        from hpc_rlhf.stages.sampler import run_sampler

    assert replica is not None
    return run_sampler(config, plan, attempt, world, replica, timeline.startup)


def _redirect_output(path: Path) -> None:
    """Append stdout and stderr to ``path``, down to the file descriptors (C++ writes there too)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()


def _log_to_stderr() -> None:
    """Our own messages, whatever the libraries do with the root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logger = logging.getLogger("hpc_rlhf")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _record_failure(
    attempt: Attempt,
    component: str,
    rank: int,
    world: World,
    timeline: Timeline,
    error: BaseException,
    console: int,
) -> None:
    """Log and record why this process ends; where the disk takes neither, tell the launcher's console."""
    step, phase = timeline.current
    text = f"{type(error).__name__}: {_explain(error, attempt)}"
    try:
        traceback.print_exception(error)
        publish_json(
            attempt.failures / f"{component}-{rank}.json",
            {
                "component": component,
                "rank": rank,
                "node": world.node,
                "step": step,
                "phase": phase,
                "error": text,
                "traceback": "".join(traceback.format_exception(error)),
                "time": time.time(),
            },
        )
    except OSError as unwritten:
        where = f"{component} rank {rank} on {world.node}, {phase} of step {step}"
        line = f"{where}: {text}\n  (not recorded: {unwritten})\n"
        with contextlib.suppress(OSError):  # that may have ended before us
            os.write(console, line.encode())


def _explain(error: BaseException, attempt: Attempt) -> str:
    """What an error says; of a filesystem that takes no more, where and what to do."""
    cause = system_error(error)
    said = isinstance(error, UserError | ComponentError)
    if not said and cause is not None and cause.errno in UNWRITABLE:
        return write_failure(cause, attempt.path)
    return str(error)


if __name__ == "__main__":
    main()
