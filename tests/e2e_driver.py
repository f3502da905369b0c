"""The command as a user runs it, on the quickstart's model with few steps."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hpc_rlhf.run_dir import RunDir
from tests.launch_driver import processes_of, wait_until

COMMAND = Path(sys.executable).with_name("hpc-rlhf")
START_TIMEOUT_S = 150  # imports of every process, on two busy cores
STEP_TIMEOUT_S = 60


@dataclass
class Command:
    """``hpc-rlhf`` with a runs directory of the test's own."""

    root: Path
    name: str = "e2e"
    overrides: tuple[str, ...] = ()
    extra_environment: dict[str, str] = field(default_factory=dict)
    base: tuple[str, ...] = ("experiment=quickstart", "warmup.steps=60")

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.root / self.name)

    def arguments(self, *more: str) -> list[str]:
        return [
            *self.base,
            f"run.root={self.root}",
            f"run.name={self.name}",
            *self.overrides,
            *more,
        ]

    def __call__(
        self, verb: str, *more: str, timeout_s: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end; stdout and stderr are captured apart."""
        return subprocess.run(
            [str(COMMAND), verb, *self.arguments(*more)],
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **self.extra_environment},
        )

    @contextmanager
    def started(self, *more: str) -> "Iterator[subprocess.Popen[str]]":
        """``hpc-rlhf run`` in the background; ended with everything it started."""
        process = subprocess.Popen(
            [str(COMMAND), "run", *self.arguments(*more)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.extra_environment},
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # the kernel then ends its children
            process.wait()

    def metrics(self) -> list[dict[str, float]]:
        path = self.run_dir.metrics / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def steps(self) -> list[int]:
        path = self.run_dir.metrics / "metrics.jsonl"
        return [int(record["step"]) for record in self.metrics()] if path.exists() else []

    def wait_step(self, step: int, process: "subprocess.Popen[str]") -> None:
        """Wait for ``step`` to be recorded."""
        wait_until(
            lambda: step in self.steps() or process.poll() is not None,
            f"step {step}",
            START_TIMEOUT_S + STEP_TIMEOUT_S,
        )
        assert step in self.steps(), process.stdout.read() if process.stdout else ""

    def pids(self, step: str) -> list[int]:
        """Process ids of the newest start of a step ("learner", "sampler-0"), in rank order."""
        log = self.run_dir.attempt(self.run_dir.attempt_numbers()[-1]).path / "logs/supervisor.log"
        pattern = re.compile(rf" {step}: started on \S+ \(pid ([\d, ]+)\)")
        started = pattern.findall(log.read_text())
        return [int(pid) for pid in started[-1].split(",")]

    def processes(self) -> list[str]:
        """Command lines of the processes of this run."""
        return processes_of(self.run_dir.path)
