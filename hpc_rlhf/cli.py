"""The ``hpc-rlhf`` command.

Only the standard library is imported before the command is known: ``--help`` must answer at once,
on a login node whose filesystem is slow.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rlhf import __version__
from hpc_rlhf.errors import ComponentError, ExitCode, UserError
from hpc_rlhf.fs import UNWRITABLE, system_error, write_failure

if TYPE_CHECKING:
    from hpc_rlhf.chain import Link

OVERRIDES_HELP = """\
OVERRIDES are Hydra's: group choices (experiment=quickstart cluster=slurm algorithm=rloo) and
fields (run.name=demo run.steps=50 learner.optimizer.lr=2e-6). `--cfg job` prints the composed
configuration instead of running. Quote values that hold '=' or blanks: 'model.path="/a=b"'.
"""

EXIT_CODES = "exit codes: 0 done, 2 bad input (nothing queued or written), 75 interrupted, resumable, 1 failed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; see ``hpc-rlhf --help``."""
    arguments = _parse(argv)
    try:
        code = int(arguments.command(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # `hpc-rlhf status RUN | head` is no error; the interpreter's own flush must not find one.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except UserError as error:
        print(f"hpc-rlhf: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except ComponentError as error:
        print(f"hpc-rlhf: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:  # during an attempt, its supervisor handles it
        print("hpc-rlhf: interrupted; the same command begins, or goes on, again", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except PermissionError as error:
        print(
            f"hpc-rlhf: {error.filename}: {error.strerror}; it belongs to somebody else",
            file=sys.stderr,
        )
        return ExitCode.BAD_INPUT
    except Exception as error:
        cause = system_error(error)
        if cause is None or cause.errno not in UNWRITABLE:
            raise
        print(f"hpc-rlhf: {write_failure(cause, Path.cwd())}", file=sys.stderr)
        return ExitCode.FAILED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options and overrides in any order, which argparse does not do below a subcommand."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = rest if "overrides" not in arguments else [a for a in rest if a.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides = rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpc-rlhf",
        description="RLHF post-training on Slurm: Megatron-core learners, vLLM samplers.",
        epilog=f"{EXIT_CODES}\n\nexamples:\n"
        "  hpc-rlhf run experiment=quickstart                   the whole loop on this machine\n"
        "  hpc-rlhf run experiment=quickstart_ppo               SFT, reward model and PPO, in order\n"
        "  hpc-rlhf submit experiment=quickstart cluster=slurm  the same as a heterogeneous job\n"
        "  hpc-rlhf status quickstart-local                     what a run is doing\n"
        "  hpc-rlhf verify quickstart-local                     is all of it still whole",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hpc-rlhf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_composed(
        commands,
        "run",
        _run,
        "run here: local processes, or the allocation it is in",
        "  hpc-rlhf run experiment=quickstart run.name=demo\n"
        "  hpc-rlhf run experiment=gsm8k model.path=DIR data.prompts=gsm8k.jsonl\n"
        "  srun and sbatch scripts: see slurm/online_het.sbatch\n\n"
        "Running the same command again resumes an interrupted run from its last checkpoint. Of a\n"
        "chain (experiment=quickstart_ppo), links that are complete are passed over; a field of one\n"
        "link is chain.LINK.FIELD, as in chain.ppo.run.steps=80.",
    )
    submit = _add_composed(
        commands,
        "submit",
        _submit,
        "check everything, queue it with Slurm, and return",
        "  hpc-rlhf submit experiment=quickstart cluster=slurm\n"
        "  hpc-rlhf submit experiment=quickstart_ppo cluster=slurm  (three jobs, each after the last)\n"
        "  hpc-rlhf submit --dry-run experiment=quickstart cluster=slurm_steps\n"
        "  hpc-rlhf submit --script experiment=quickstart cluster=slurm > my.sbatch",
    )
    submit.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything and print the job script (of a chain: all), queue nothing; assets and "
        "tokenised data are made and kept, as for the run",
    )
    submit.add_argument(
        "--script",
        action="store_true",
        help="print a script of the same job to sbatch by hand, queue nothing",
    )
    _add_of_run(
        commands,
        "status",
        _status,
        "what a run is doing; without RUN, all runs",
        "State, step and the reason of the last end of one run; without RUN, a line for each run.",
        optional=True,
    )
    verify = _add_of_run(
        commands,
        "verify",
        _verify,
        "read everything a run wrote again, and say what is whole",
        "The configuration, checkpoints by the sha256 of every file, rollouts, metrics, frozen models. "
        "Exit code 0 if all is whole, else 1.",
    )
    verify.add_argument("--verbose", action="store_true", help="a line for every step's rollouts")
    return parser


def _add_composed(commands, name, command, text, examples) -> argparse.ArgumentParser:  # type: ignore[no-untyped-def]
    parser = commands.add_parser(
        name,
        help=text,
        usage=f"hpc-rlhf {name} [OPTIONS] [OVERRIDES]",
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"{OVERRIDES_HELP}\nexamples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config-dir", type=Path, help="a directory of config groups of your own")
    parser.add_argument("--cfg", choices=("job",), help="print the composed configuration and stop")
    parser.set_defaults(command=command, overrides=[])
    return parser


def _add_of_run(  # type: ignore[no-untyped-def]
    commands, name, command, text, description=None, *, optional=False
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=f"example:\n  hpc-rlhf {name} quickstart-local",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?" if optional else None,
        help="a run's directory, or its name under --root",
    )
    parser.add_argument("--root", default="runs", help="where runs are looked for by name")
    parser.set_defaults(command=command)
    return parser


def _composed(arguments: argparse.Namespace) -> "tuple[Link, ...] | None":
    """The checked configurations of a run, or of a chain's runs; None when they were only printed."""
    from hpc_rlhf import compose
    from hpc_rlhf.chain import before_the_chain, compose_links
    from hpc_rlhf.planner import preflight
    from hpc_rlhf.runs import check_resume

    links = compose_links(arguments.overrides, config_directory=arguments.config_dir)
    if arguments.cfg:
        documents = [
            f"# {link.name}\n" * bool(link.name) + compose.to_yaml(link.config) for link in links
        ]
        print("---\n".join(documents), end="")
        return None
    for link in links:
        preflight.check_settings(link.config)
        check_resume(link.config)
    for link in links:
        if link.config.assets:
            from hpc_rlhf.data import quickstart

            quickstart.prepare(link.config.assets)
    for link, now in zip(links, before_the_chain(links), strict=True):
        for note in preflight.check(now.config, reward_model_to_come=now.reward_model_to_come):
            print(f"{link.name}: {note}" if link.name else note, file=sys.stderr)
    return links


def _run(arguments: argparse.Namespace) -> int:
    from hpc_rlhf.launch.claim import check_free
    from hpc_rlhf.launch.foreground import check_launcher, run_chain, run_here
    from hpc_rlhf.runs import open_run

    links = _composed(arguments)
    if links is None:
        return ExitCode.DONE
    for link in links:
        check_launcher(link.config, in_chain=len(links) > 1)
        check_free(link.run)
    if len(links) > 1:
        return run_chain(links)
    return run_here(links[0].config, open_run(links[0].config))


def _submit(arguments: argparse.Namespace) -> int:
    from hpc_rlhf.compose import with_absolute_paths
    from hpc_rlhf.config import Launcher
    from hpc_rlhf.launch import slurm
    from hpc_rlhf.launch.foreground import show_outcome
    from hpc_rlhf.launch.job_plan import plan_job
    from hpc_rlhf.launch.sbatch import render_script

    links = _composed(arguments)
    if links is None:
        return ExitCode.DONE
    for link in links:
        if link.config.cluster.launcher is not Launcher.SLURM:
            raise UserError(
                f"cluster.launcher={link.config.cluster.launcher}: submit needs Slurm; "
                "choose cluster=slurm or cluster=slurm_steps, or use `hpc-rlhf run`"
            )
    plans = [plan_job(link.config, link.run.path) for link in links]
    if arguments.script:
        if len(plans) > 1:
            raise UserError(
                "--script: a chain is one job for each of its links; `hpc-rlhf submit` queues them, and "
                "--dry-run prints their scripts"
            )
        command = [_program(), "run", *with_absolute_paths(arguments.overrides)]
        if arguments.config_dir is not None:
            command += ["--config-dir", str(arguments.config_dir.absolute())]
        print(render_script(plans[0], command), end="")
        return ExitCode.DONE
    if arguments.dry_run:
        names = [link.name for link in links]
        print(slurm.job_scripts(plans, names) if names[0] else slurm.job_script(plans[0]), end="")
        return ExitCode.DONE
    for plan in plans:
        if plan.run.complete.exists():
            print(f"{plan.run_dir} is complete; nothing was queued")
    waiting = [link for link in links if not link.run.complete.exists()]
    if waiting:
        _queue(waiting, in_chain=len(links) > 1)
    elif len(links) > 1:
        show_outcome(links)
    return ExitCode.DONE


def _program() -> str:
    """This command for a script: a batch job may have another PATH."""
    path = Path(sys.executable).with_name("hpc-rlhf")
    return str(path) if path.exists() else "hpc-rlhf"


def _queue(links: "Sequence[Link]", *, in_chain: bool) -> None:
    """Queue the jobs of runs that are not complete, all of them or none."""
    from hpc_rlhf.launch import slurm
    from hpc_rlhf.launch.claim import check_free
    from hpc_rlhf.launch.job_plan import plan_job
    from hpc_rlhf.launch.status import check_not_queued
    from hpc_rlhf.runs import open_run

    for link in links:
        check_free(link.run)
        if in_chain:
            check_not_queued(link.run)
    new = [link.run.path for link in links if not link.run.path.exists()]
    for link in links:
        open_run(link.config)
    plans = [plan_job(link.config, link.run.path) for link in links]
    try:
        jobs = slurm.submit_chain(plans)
    except UserError:
        for path in new:  # exit code 2: nothing queued, nothing written
            shutil.rmtree(path)
        raise
    for link, job in zip(links, jobs, strict=True):
        what = f"{link.name}: " if link.name else ""
        print(f"{what}submitted job {job.job_id}; follow it with: hpc-rlhf status {link.run.path}")


def _status(arguments: argparse.Namespace) -> int:
    from hpc_rlhf.launch.status import RunState, describe_run, read_goal
    from hpc_rlhf.observe.eta import duration, seconds_a_step, seconds_left
    from hpc_rlhf.observe.metrics import read_metrics
    from hpc_rlhf.runs import find_run

    if arguments.run is None:
        return _list_runs(Path(arguments.root))
    run = find_run(arguments.run, arguments.root)
    status = describe_run(run)
    _, steps = read_goal(run)
    for name in ("state", "attempt", "job_id", "step", "phase", "reason"):
        value = getattr(status, name)
        if value is not None:
            of = f" of {steps}" if name == "step" and steps else ""
            print(f"{name.replace('_id', ''):8} {value}{of}")
    records = read_metrics(run) if status.state is RunState.RUNNING else []
    pace, left = seconds_a_step(records), seconds_left(records, steps or 0)
    if pace and left:
        print(f"{'left':8} about {duration(left)}, at {pace:.1f} s a step")
    for number, line in enumerate(status.slurm):
        print(f"{'' if number else 'slurm':8} {line}")
    print(f"{'run':8} {run.path}")
    return ExitCode.DONE


def _list_runs(root: Path) -> int:
    from hpc_rlhf.launch.status import list_runs
    from hpc_rlhf.observe.eta import duration

    rows = [("run", "stage", "state", "step", "last active")]
    for one in list_runs(root):
        step = "-" if one.step is None else str(one.step)
        ago = f"{duration(max(0.0, time.time() - one.active))} ago"
        of = f" of {one.steps}" if one.steps else ""
        rows.append((one.run.path.name, one.stage or "?", one.state, step + of, ago))
    if len(rows) == 1:
        print(f"no run in {root}; --root says where else to look")
        return ExitCode.DONE
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    return ExitCode.DONE


def _verify(arguments: argparse.Namespace) -> int:
    from hpc_rlhf.checkpoint.report import show_verification
    from hpc_rlhf.runs import find_run

    run = find_run(arguments.run, arguments.root)
    whole = show_verification(run, verbose=arguments.verbose)
    return ExitCode.DONE if whole else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
