"""Drives tests/launch_program.py, which stands in for the components of a run."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rlhf.launch.job_plan import ComponentPlan, JobPlan, Resources

PROGRAM = Path(__file__).with_name("launch_program.py")


@dataclass(frozen=True)
class Driver:
    """Tells the processes of tests/launch_program.py what to do, and sees what they did."""

    run: Path

    def plan(self, *, learners: int = 2, samplers: int = 1, **options: Any) -> JobPlan:
        sampler = {k: options.pop(k) for k in ("max_restarts", "restart_reset_s") if k in options}
        components = (
            ComponentPlan("learner", Resources(tasks_per_node=learners)),
            ComponentPlan(
                "sampler", Resources(tasks_per_node=samplers), replicas=samplers, **sampler
            ),
        )
        defaults = {"signal_delay_s": 20, "prefix": (sys.executable, str(PROGRAM))}
        return JobPlan("test", self.run, components, **{**defaults, **options})

    def do(self, name: str, what: str = "") -> None:
        temporary = self.run / "do" / f".{name}"
        temporary.write_text(what)
        temporary.replace(self.run / "do" / name)

    def started(self, name: str, incarnation: int = 0) -> dict[str, Any] | None:
        path = self.run / "do" / f"{name}.started-{incarnation}"
        return json.loads(path.read_text()) if path.exists() else None

    def wait_started(self, name: str, incarnation: int = 0) -> dict[str, Any]:
        wait_until(lambda: self.started(name, incarnation) is not None, f"{name} to start")
        found = self.started(name, incarnation)
        assert found is not None
        return found

    def processes(self) -> list[str]:
        return processes_of(self.run)


def processes_of(run: Path) -> list[str]:
    """Command lines of the processes of a run, in any namespace of this machine."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(run) in line and path.parent.name != str(os.getpid()):
            lines.append(line)
    return lines


def is_alive(pid: int) -> bool:
    """Whether a process runs (a dead one stays a zombie where nobody reaps it)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)
