"""``hpc-rlhf run``: one attempt supervised by this process, with the table of its steps."""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from hpc_rlhf.chain import Link
from hpc_rlhf.config import Config, Launcher
from hpc_rlhf.errors import ExitCode, UserError
from hpc_rlhf.launch.job_plan import plan_job
from hpc_rlhf.launch.local import LocalStepLauncher
from hpc_rlhf.launch.srun import SlurmStepLauncher, in_allocation
from hpc_rlhf.launch.supervisor import run_attempt
from hpc_rlhf.observe.outcome import outcome
from hpc_rlhf.observe.table import follow, summary
from hpc_rlhf.planner import preflight
from hpc_rlhf.run_dir import RunDir
from hpc_rlhf.runs import open_run

_PIPED_WIDTH = 160


def check_launcher(config: Config, *, in_chain: bool = False) -> None:
    """Refuse ``run`` on Slurm nodes outside of an allocation, and of a chain within one.

    Raises:
        UserError: says to submit instead.
    """
    if config.cluster.launcher is Launcher.SLURM and in_chain:
        raise UserError(
            "cluster.launcher=slurm: the links of a chain ask for allocations of their own; use "
            "`hpc-rlhf submit` with the same overrides"
        )
    if config.cluster.launcher is Launcher.SLURM and not in_allocation():
        raise UserError(
            "cluster.launcher=slurm, but this is not an allocation: use `hpc-rlhf submit` with the "
            "same overrides, or an sbatch script that calls `hpc-rlhf run`"
        )


def run_chain(links: Sequence[Link]) -> ExitCode:
    """Work on the runs of a chain in their order, those that are complete passed over.

    Returns:
        The exit code of the first one that is not done; else DONE, and what came of each is shown.
    """
    console = _console()
    for number, link in enumerate(links, 1):
        console.print(f"link {number} of {len(links)}: {link.name}", highlight=False)
        if link.run.complete.exists():
            console.print(f"{link.run.path} is complete", highlight=False)
            continue
        preflight.check(link.config)  # once more: now with the models that the links before made
        code = run_here(link.config, open_run(link.config))
        if code != ExitCode.DONE:
            return code
    show_outcome(links)
    return ExitCode.DONE


def show_outcome(links: Sequence[Link]) -> None:
    """Print what each link of a chain is judged by."""
    runs = {link.name: link.run for link in links}
    untrained = {link.name: link.config.critic.warmup_steps for link in links}
    _console().print(outcome(runs, untrained))


def run_here(config: Config, run: RunDir) -> ExitCode:
    """Work on ``run`` until it is done, interrupted or failed."""
    console = _console()
    if run.complete.exists():
        console.print(f"{run.path} is complete")
        console.print(summary(run))
        return ExitCode.DONE
    slurm = config.cluster.launcher is Launcher.SLURM
    with _table(run, console, config.run.steps):
        code = run_attempt(
            plan_job(config, run.path), SlurmStepLauncher if slurm else LocalStepLauncher
        )
    if code == ExitCode.DONE:
        console.print(summary(run))
    return code


def _console() -> Console:
    # a pipe or a log has no width: paths in it are to be copied whole
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)


@contextmanager
def _table(run: RunDir, console: Console, steps: int) -> Iterator[None]:
    """Follow the run's metrics in a thread: the main one has the signals."""
    stop = threading.Event()
    newest = max(run.attempt_numbers(), default=0)
    shown = (run, stop.is_set, console, newest, steps)
    thread = threading.Thread(target=follow, args=shown, name="table")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
