"""``hpc-rlhf run``: one attempt supervised by this process, with the table of its steps."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from hpc_rlhf.config import Config, Launcher
from hpc_rlhf.errors import ExitCode, UserError
from hpc_rlhf.launch.job_plan import plan_job
from hpc_rlhf.launch.local import LocalStepLauncher
from hpc_rlhf.launch.srun import SlurmStepLauncher, in_allocation
from hpc_rlhf.launch.supervisor import run_attempt
from hpc_rlhf.observe.table import follow, summary
from hpc_rlhf.run_dir import RunDir

_PIPED_WIDTH = 160


def check_launcher(config: Config) -> None:
    """Refuse ``run`` on Slurm nodes outside of an allocation.

    Raises:
        UserError: says to submit instead.
    """
    if config.cluster.launcher is Launcher.SLURM and not in_allocation():
        raise UserError(
            "cluster.launcher=slurm, but this is not an allocation: use `hpc-rlhf submit` with the "
            "same overrides, or an sbatch script that calls `hpc-rlhf run`"
        )


def run_here(config: Config, run: RunDir) -> ExitCode:
    """Work on ``run`` until it is done, interrupted or failed."""
    # a pipe or a log has no width: paths in it are to be copied whole
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    if run.complete.exists():
        console.print(f"{run.path} is complete")
        console.print(summary(run))
        return ExitCode.DONE
    slurm = config.cluster.launcher is Launcher.SLURM
    with _table(run, console):
        code = run_attempt(
            plan_job(config, run.path), SlurmStepLauncher if slurm else LocalStepLauncher
        )
    if code == ExitCode.DONE:
        console.print(summary(run))
    return code


@contextmanager
def _table(run: RunDir, console: Console) -> Iterator[None]:
    """Follow the run's metrics in a thread: the main one has the signals."""
    stop = threading.Event()
    newest = max(run.attempt_numbers(), default=0)
    thread = threading.Thread(target=follow, args=(run, stop.is_set, console, newest), name="table")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
