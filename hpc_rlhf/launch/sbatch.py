"""JobPlan -> text of the job script. Pure: what is queued can be read, compared and kept in a test."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpc_rlhf.config import Het, Requeue
from hpc_rlhf.errors import UserError
from hpc_rlhf.launch.job_plan import JobPlan, Options, Resources


def is_heterogeneous(plan: JobPlan) -> bool:
    """Whether the plan becomes a heterogeneous job (one component alone never does)."""
    return plan.het == Het.JOB and len(plan.components) > 1


def render_header(plan: JobPlan, *, output: Path | None = None, error: Path | None = None) -> str:
    """Render the shebang and the ``#SBATCH`` lines; options that are not set are left out.

    Args:
        output: standard output of the batch script, with Slurm's patterns (%j).
        error: its standard error.

    Raises:
        UserError: two components ask different values of an option of their one allocation.
    """
    files = [("output", output), ("error", error)]
    job: Options = (
        ("job-name", plan.name),
        *((name, str(path)) for name, path in files if path is not None),
        ("open-mode", "append"),  # a requeued job has the same id, and so the same files
        ("requeue" if plan.requeue == Requeue.REQUEUE else "no-requeue", ""),
        # to the batch script alone, where the supervisor is: a server would die of it
        ("signal", f"B:{plan.signal}@{plan.signal_delay_s}"),
    )
    # options of the leader do not carry over to the other components
    each: Options = (
        *((k, v) for k in ("account", "partition", "qos") if (v := getattr(plan, k)) is not None),
        ("time", str(plan.time_min)),
    )
    if is_heterogeneous(plan):
        groups = [(*each, *_node_options(c.resources)) for c in plan.components]
    else:
        groups = [(*each, *_node_options(_one_allocation(plan)))]
    groups = [_override(group, plan.extra) for group in groups]
    groups[0] = _override((*job, *groups[0]), plan.extra)
    return "#!/bin/bash\n" + "#SBATCH hetjob\n".join(_lines(group) for group in groups)


def render_script(
    plan: JobPlan,
    command: Sequence[str],
    *,
    output: Path | None = None,
    error: Path | None = None,
    environment: Options = (),
) -> str:
    """Render the whole job script: header, the site's setup lines, and ``exec command``.

    ``exec``, since Slurm signals the process of the batch script and none of its children.

    Args:
        environment: variables that the command needs besides those of the job.
    """
    body = [*plan.setup, *(f"export {k}={shlex.quote(v)}" for k, v in environment)]
    body.append(f"exec {shlex.join(command)}")
    return render_header(plan, output=output, error=error) + "\n" + "\n".join(body) + "\n"


def _node_options(resources: Resources) -> Options:
    options = [
        ("nodes", str(resources.nodes)),
        ("ntasks-per-node", str(resources.tasks_per_node)),
        ("cpus-per-task", str(resources.cpus_per_task)),
    ]
    if resources.mem_per_node_mb is not None:
        options.append(("mem", f"{resources.mem_per_node_mb}M"))
    if resources.gpus_per_node and not has_own_gpu_request(resources.extra):
        options.append(("gpus-per-node", str(resources.gpus_per_node)))
    return _override(tuple(options), resources.extra)


def has_own_gpu_request(extra: Options) -> bool:
    """Whether the site's own options ask for the GPUs, in the way the site wants it."""
    return any(name == "gres" or name.startswith("gpus") for name, _ in extra)


def _one_allocation(plan: JobPlan) -> Resources:
    """The allocation that holds all components as steps: every node fits any of them."""
    parts = [component.resources for component in plan.components]
    tasks = max(part.tasks_per_node for part in parts)
    cpus = max(part.tasks_per_node * part.cpus_per_task for part in parts)
    memory = [part.mem_per_node_mb for part in parts if part.mem_per_node_mb is not None]
    extra: dict[str, str] = {}
    for component in plan.components:
        for name, value in component.resources.extra:
            if extra.setdefault(name, value) != value:
                raise UserError(
                    f"cluster.{component.name}.extra.{name}={value}: with cluster.het=steps all "
                    f"components share one allocation, and another one asks {name}={extra[name]}"
                )
    return Resources(
        nodes=sum(part.nodes for part in parts),
        tasks_per_node=tasks,
        cpus_per_task=-(-cpus // tasks),
        gpus_per_node=max(part.gpus_per_node for part in parts),
        mem_per_node_mb=max(memory, default=None),
        extra=tuple(extra.items()),
    )


def _override(options: Options, extra: Options) -> Options:
    """Options with ``extra`` in the place of those of the same name, else at the end."""
    return tuple({**dict(options), **dict(extra)}.items())


def _lines(options: Options) -> str:
    return "".join(
        f"#SBATCH --{name}={shlex.quote(value)}\n" if value else f"#SBATCH --{name}\n"
        for name, value in options
    )
