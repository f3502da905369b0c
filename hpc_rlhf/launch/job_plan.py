"""What a run asks of the scheduler, as plain data: no Slurm, no torch, no Hydra."""

import dataclasses
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_rlhf.cluster.signals import signal_number
from hpc_rlhf.config import ComponentResources, Config, Het, Requeue
from hpc_rlhf.errors import UserError
from hpc_rlhf.run_dir import RunDir

LEARNER = "learner"
SAMPLER = "sampler"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_VARIABLES = ("SLURM_", "HPC_RLHF_")
_NODES = "cluster.learner.nodes and cluster.sampler.nodes"
_TASKS = "cluster.learner.tasks_per_node and cluster.sampler.tasks_per_node"
_LOGS = "run.root and run.name: every log is in the run directory"
_OWN_OPTIONS = {
    "nodes": _NODES,
    "ntasks": _TASKS,
    "ntasks-per-node": _TASKS,
    "cpus-per-task": "cluster.learner.cpus_per_task and cluster.sampler.cpus_per_task",
    "time": "cluster.time_min",
    "account": "cluster.account",
    "partition": "cluster.partition",
    "qos": "cluster.qos",
    "signal": "cluster.signal and cluster.signal_delay_s",
    "requeue": "cluster.requeue",
    "no-requeue": "cluster.requeue",
    "job-name": "run.name",
    "output": _LOGS,
    "error": _LOGS,
    "open-mode": _LOGS,
    "array": "one run.name for each job",
}
"""What no ``extra`` may say: the setting to use. Memory and GPUs have more than one way of being asked for."""

Options = tuple[tuple[str, str], ...]
"""Further sbatch options by their long names without dashes; an empty value is a bare switch."""


@dataclass(frozen=True)
class Resources:
    """What one component gets, the same on each of its nodes."""

    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    mem_per_node_mb: int | None = None
    extra: Options = ()

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node


@dataclass(frozen=True)
class ComponentPlan:
    """One component: a single world of ``resources.tasks`` ranks, or replicas of one task each."""

    name: str
    resources: Resources
    replicas: int = 0  # 0: one step with all tasks, whose end ends the attempt
    max_restarts: int = 0  # deaths in a row of one replica that are repaired
    restart_reset_s: float = 600.0  # a replica that lived this long starts a new row

    @property
    def replicated(self) -> bool:
        return self.replicas > 0

    @property
    def replica_resources(self) -> Resources:
        """The share of one replica: one task, and its part of a node."""
        whole = self.resources
        memory = whole.mem_per_node_mb
        return replace(
            whole,
            nodes=1,
            tasks_per_node=1,
            gpus_per_node=whole.gpus_per_node // whole.tasks_per_node,
            mem_per_node_mb=None if memory is None else memory // whole.tasks_per_node,
        )


@dataclass(frozen=True)
class JobPlan:
    """One attempt's allocation: the components in the order of their het groups."""

    name: str
    run_dir: Path
    components: tuple[ComponentPlan, ...]
    het: Het = Het.JOB
    time_min: int = 60
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    signal: str = "USR2"
    signal_delay_s: int = 120
    requeue: Requeue = Requeue.REQUEUE
    max_attempts_without_progress: int = 5
    setup: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    extra: Options = ()
    python: str = sys.executable

    @property
    def run(self) -> RunDir:
        return RunDir(self.run_dir)

    def component(self, name: str) -> ComponentPlan:
        return self.components[self.group(name)]

    def group(self, name: str) -> int:
        """Index of the component, which is its het group."""
        return [component.name for component in self.components].index(name)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "run_dir": str(self.run_dir)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "JobPlan":
        """The inverse of :meth:`to_json`, also after a trip through a JSON file."""
        components = tuple(
            ComponentPlan(
                **{
                    **component,
                    "resources": Resources(
                        **{
                            **component["resources"],
                            "extra": _pairs(component["resources"]["extra"]),
                        }
                    ),
                }
            )
            for component in value["components"]
        )
        return cls(
            **{
                **value,
                "run_dir": Path(value["run_dir"]),
                "components": components,
                "het": Het(value["het"]),
                "requeue": Requeue(value["requeue"]),
                "setup": tuple(value["setup"]),
                "prefix": tuple(value["prefix"]),
                "environment": _pairs(value["environment"]),
                "extra": _pairs(value["extra"]),
            }
        )


def plan_job(config: Config, run_dir: Path) -> JobPlan:
    """Derive the job from the configuration.

    Raises:
        UserError: a signal or an option that no scheduler can serve. The numbers by themselves are
            the planner's to check.
    """
    cluster = config.cluster
    if cluster.signal_delay_s >= 60 * cluster.time_min:
        raise UserError(
            f"cluster.signal_delay_s={cluster.signal_delay_s}: so long before the end of "
            f"cluster.time_min={cluster.time_min} the job would be asked to stop at its start; it must "
            "hold a save, and leave the rest to the run"
        )
    try:
        signal_number(cluster.signal)
    except ValueError as error:
        raise UserError(
            f"cluster.signal={cluster.signal}: {error}; write USR2, TERM, ..."
        ) from None
    for name in ("account", "partition", "qos", "network_interface"):
        value = getattr(cluster, name)
        if value is not None and not value.strip():
            raise UserError(f"cluster.{name}={value!r}: expected a name, or null for none")
    learner = ComponentPlan(name=LEARNER, resources=_resources(LEARNER, cluster.learner))
    components: tuple[ComponentPlan, ...] = (learner,)
    if not config.stage.is_offline:
        sampler = _resources(SAMPLER, cluster.sampler)
        components += (
            ComponentPlan(
                name=SAMPLER,
                resources=sampler,
                replicas=sampler.tasks,
                max_restarts=config.sampler.max_restarts,
                restart_reset_s=config.sampler.restart_reset_s,
            ),
        )
    environment = _environment(cluster.environment)
    if not any(component.resources.gpus_per_node for component in components):
        # ranks that share cores would each start a thread per core
        environment.setdefault("OMP_NUM_THREADS", "1")
    return JobPlan(
        name=config.run.name,
        run_dir=run_dir.absolute(),
        components=components,
        het=cluster.het,
        time_min=cluster.time_min,
        account=cluster.account,
        partition=cluster.partition,
        qos=cluster.qos,
        signal=cluster.signal.removeprefix("SIG"),
        signal_delay_s=cluster.signal_delay_s,
        requeue=cluster.requeue,
        max_attempts_without_progress=config.run.max_attempts_without_progress,
        setup=tuple(cluster.setup),
        prefix=tuple(cluster.prefix),
        environment=tuple(sorted(environment.items())),
        extra=_options("cluster.extra", cluster.extra),
    )


def component_command(
    plan: JobPlan, component: str, attempt_number: int, replica: int | None = None
) -> list[str]:
    """The command of every process of a component, whatever launches it."""
    command = [*plan.prefix, plan.python, "-m", "hpc_rlhf.launch.component", component]
    command += ["--run", str(plan.run_dir), "--attempt", str(attempt_number)]
    if replica is not None:
        command += ["--replica", str(replica)]
    return command


def _resources(component: str, config: ComponentResources) -> Resources:
    where = f"cluster.{component}"
    return Resources(
        nodes=config.nodes,
        tasks_per_node=config.tasks_per_node,
        cpus_per_task=config.cpus_per_task,
        gpus_per_node=config.gpus_per_node,
        mem_per_node_mb=config.mem_per_node_mb,
        extra=_options(f"{where}.extra", config.extra),
    )


def _options(where: str, values: dict[str, Any]) -> Options:
    """Normalise further sbatch options: true is a bare switch, false and null leave it out."""
    options = []
    for name, value in values.items():
        text = "" if value is True else str(value)
        option = name.replace("_", "-")
        if "\n" in f"{name}{text}" or name.startswith("-") or len(name) < 2:
            raise UserError(f"{where}.{name}: write the long option's name without dashes")
        if isinstance(value, dict | list):
            raise UserError(f"{where}.{name}={value}: expected text, a number, true or null")
        if option in _OWN_OPTIONS:
            raise UserError(
                f"{where}.{name}: hpc-rlhf sets and relies on this option itself; use "
                f"{_OWN_OPTIONS[option]}"
            )
        if value is not None and value is not False:
            options.append((option, text))
    return tuple(options)


def _environment(values: Mapping[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise UserError(
                f"cluster.environment: {name!r} can be no variable of an environment; expected letters, "
                "digits and _, not beginning with a digit"
            )
        if name.startswith(_OWN_VARIABLES):
            raise UserError(
                f"cluster.environment.{name}: {' and '.join(_OWN_VARIABLES)} are set by Slurm and by "
                "hpc-rlhf; take it out"
            )
    return dict(values)


def _pairs(values: Any) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in values)
