"""What all tests share: their environment, order and time limits, and the Slurm sandbox."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# Before anything imports torch: the tests start many processes on few cores. And a job that the
# tests themselves may run in is none of theirs.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
for _name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SRUN_"))]:
    del os.environ[_name]

import pytest

pytest_plugins = ["tests.tiny_models"]

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_TIMEOUT_S = 240
# What holds an expensive fixture runs together, and what is cheap runs first.
ORDER = ("distributed", "engine", "slurm", "slow", "soak", "gpu")


# ------------------------------------------------------------------------------ selection and order


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forbid-skips", action="store_true", help="fail when a test is skipped")
    parser.addoption(
        "--gpu-tests-on-cpu",
        action="store_true",
        help="run the GPU tests without a GPU, but for those of CUDA's own kernels and streams",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what needs a GPU where there is none; order the rest."""
    markers = {item: item.get_closest_marker("gpu") for item in items}
    need_gpu = [item for item, marker in markers.items() if marker]
    if config.getoption("--gpu-tests-on-cpu"):
        need_gpu = [item for item in need_gpu if markers[item].kwargs.get("cuda_only")]
    if need_gpu and not _has_gpu():
        config.hook.pytest_deselected(items=need_gpu)
        items[:] = [item for item in items if item not in need_gpu]
    items.sort(key=_group)  # stable: files stay in order within a group


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _group(item: pytest.Item) -> int:
    return max((i for i, name in enumerate(ORDER, 1) if item.get_closest_marker(name)), default=0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    skipped = _skips(terminalreporter)
    if skipped and config.getoption("--forbid-skips"):
        terminalreporter.section("skipped, which --forbid-skips forbids", red=True)
        for report in skipped:
            terminalreporter.line(f"{report.nodeid}: {report.longrepr}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    forbidden = session.config.getoption("--forbid-skips")
    if session.exitstatus == pytest.ExitCode.OK and forbidden and reporter and _skips(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skips(reporter: pytest.TerminalReporter) -> list[pytest.TestReport | pytest.CollectReport]:
    """Reports of skipped tests and of modules skipped while they were collected."""
    return list(reporter.stats.get("skipped", []))


# -------------------------------------------------------------------------------------- time limits

_stderr = pytest.StashKey[int]()


class TestTimeout(Exception):
    """A phase of a test ran longer than its limit."""

    __test__ = False


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno())  # the real one: not captured here yet


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with TimeLimit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with TimeLimit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with TimeLimit(item):
        return (yield)


class TimeLimit:
    """Bounds one phase of a test: set-up, call or teardown each have the limit to themselves.

    At the limit the main thread gets :class:`TestTimeout`, so that fixtures clean up. A main thread
    that hangs in C, where Python runs no signal handler, ends the whole session a minute later.
    """

    HARD_LIMIT_AFTER_S = 60

    def __init__(self, item: pytest.Item):
        marker = item.get_closest_marker("timeout")
        self.seconds = int(marker.args[0]) if marker else DEFAULT_TIMEOUT_S
        self.stderr = item.config.stash[_stderr]

    def __enter__(self) -> None:
        self.previous = signal.signal(signal.SIGALRM, self.expired)
        signal.alarm(self.seconds)
        hard_limit = self.seconds + self.HARD_LIMIT_AFTER_S
        faulthandler.dump_traceback_later(hard_limit, exit=True, file=self.stderr)

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, self.previous)

    def expired(self, _number: int, _frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=self.stderr)
        raise TestTimeout(f"longer than {self.seconds} s")


# -------------------------------------------------------------------------------------------- Slurm


NODES = range(1, 5)


@dataclass(frozen=True)
class SlurmSandbox:
    """tools/slurm_sandbox, whose state is in ``directory``."""

    directory: Path

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "etc/slurm.conf"

    def __call__(self, *arguments: str | int, timeout_s: float = 150) -> str:
        """Run a command of the tool, like ``sandbox("kill-node", 2)``; returns its stdout.

        Raises:
            AssertionError: it failed; with its output.
        """
        done = self.try_command(*arguments, timeout_s=timeout_s)
        assert done.returncode == 0, f"slurm_sandbox {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def try_command(
        self, *arguments: str | int, timeout_s: float = 150
    ) -> subprocess.CompletedProcess[str]:
        tool = REPOSITORY / "tools/slurm_sandbox"
        command = [str(tool), "--dir", str(self.directory), *map(str, arguments)]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=timeout_s
        )

    def node_states(self) -> set[str]:
        states = ["sinfo", "--noheader", "--Node", "--format=%t"]
        return set(subprocess.check_output(states, text=True).split())

    @staticmethod
    def update_node(node: int, state: str) -> None:
        """Fails where the node is in that state, or in a better one as it registered meanwhile."""
        update = ["scontrol", "update", f"nodename=node{node}", f"state={state}", "reason=test"]
        subprocess.run(update, check=False, capture_output=True)

    def is_free(self, timeout_s: float) -> bool:
        """Wait until nothing runs on any node, and every one could be used."""
        until = time.monotonic() + timeout_s
        while self.node_states() != {"idle"}:
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def restore(self) -> None:
        """Cancel all jobs, and bring back the nodes that a test killed, cut off or left full.

        Raises:
            AssertionError: a node cannot be used again within two minutes.
        """
        subprocess.run(["scancel", "--me"], check=True)
        # A node that is booted before Slurm took it for down keeps the job that was on it
        # COMPLETING, for minutes: Slurm was told of no end. Down once, it is rid of it.
        for node in NODES:
            self.update_node(node, "down")
        for node in NODES:
            self.update_node(node, "resume")
            self.try_command("heal-node", node)  # fails where the node is dead
            self("start-node", node)
        for _ in range(10):
            if self.is_free(timeout_s=6):
                return
            for node in NODES:
                self.update_node(node, "resume")
        raise AssertionError(f"the nodes of the sandbox are {self.node_states()}, not idle")


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmSandbox]:
    """A running Slurm of four nodes; SLURM_CONF points at it. One that was up already is left up.

    It is an error, not a skip, when it cannot be brought up.
    """
    sandbox = SlurmSandbox(Path(os.environ.get("SLURM_SANDBOX_DIR", "/tmp/slurm-sandbox")))
    os.environ["SLURM_CONF"] = str(sandbox.slurm_conf)
    ping = ["scontrol", "ping"]  # without that file it waits a minute for it
    was_up = (
        sandbox.slurm_conf.exists()
        and subprocess.run(ping, check=False, capture_output=True).returncode == 0
    )
    sandbox("up")  # also boots nodes that are dead
    yield sandbox
    del os.environ["SLURM_CONF"]
    if not was_up:
        sandbox("down")
