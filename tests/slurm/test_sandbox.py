"""The Slurm sandbox itself: other Slurm tests rely on what is shown here."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import SlurmSandbox

pytestmark = pytest.mark.slurm

NODES = ["node1", "node2", "node3", "node4"]


def run(*command: str, timeout_s: float = 60) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def node_state(node: str) -> str:
    return run("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%t").split()[0]


# ------------------------------------------------------------------------- the cluster of a session


def test_every_node_has_a_name_and_an_address_of_its_own(slurm_cluster: SlurmSandbox) -> None:
    lines = run("srun", "--nodes=4", "bash", "-c", "echo $(hostname) $(hostname -I)").splitlines()
    assert sorted(lines) == [f"node{i} 10.77.0.{10 + i}" for i in range(1, 5)]


def test_nodes_reach_each_other_by_name(slurm_cluster: SlurmSandbox) -> None:
    greet = (
        "import socket; s = socket.create_server(('', 5555)); "
        "print('ready', flush=True); s.accept()[0].sendall(b'hello')"
    )
    server = subprocess.Popen(
        ["srun", "--nodelist=node2", "python3", "-c", greet], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    listen = "import socket; print(socket.create_connection(('node2', 5555), 5).recv(9).decode())"
    assert run("srun", "--nodelist=node4", "python3", "-c", listen) == "hello\n"
    assert server.wait(20) == 0


def test_gpus_are_counted_and_shown_to_tasks(slurm_cluster: SlurmSandbox) -> None:
    show = ("bash", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert run("srun", "--ntasks=1", "--gpus-per-node=2", *show) == "0,1\n"
    assert run("srun", "--ntasks=1", "--gpus-per-node=1", *show) == "0\n"
    refused = subprocess.run(
        ["srun", "--ntasks=1", "--gpus-per-node=3", "true"], check=False, capture_output=True
    )
    assert refused.returncode != 0


def test_partitions_for_preemption(slurm_cluster: SlurmSandbox) -> None:
    text = run("scontrol", "--oneliner", "show", "partition")
    partitions = {
        fields["PartitionName"]: fields
        for line in text.splitlines()
        if (fields := dict(word.split("=", 1) for word in line.split()))
    }
    assert set(partitions) == {"main", "low", "high"}
    assert partitions["main"]["Default"] == "YES"
    assert partitions["low"]["PreemptMode"] == "REQUEUE"
    assert int(partitions["low"]["GraceTime"]) == 30
    tier = {name: int(fields["PriorityTier"]) for name, fields in partitions.items()}
    assert tier["low"] < tier["main"] < tier["high"]


def test_heterogeneous_job_runs_and_is_accounted(
    slurm_cluster: SlurmSandbox, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    output = tmp_path / "out.txt"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2 --time=2 --output={output}\n#SBATCH hetjob\n"
        "#SBATCH --nodes=1 --gpus-per-node=1\n"
        'echo "components $SLURM_HET_SIZE"\n'
        "srun --het-group=0 bash -c 'echo first $SLURM_PROCID/$SLURM_NTASKS' &\n"
        "srun --het-group=1 bash -c 'echo second $SLURM_PROCID/$SLURM_NTASKS' &\n"
        "wait\n"
    )
    job = run("sbatch", "--parsable", str(script)).strip()

    def states() -> dict[str, str]:
        lines = run("sacct", "-nXP", f"--jobs={job}", "--format=JobID,State").splitlines()
        return dict(line.split("|") for line in lines)

    completed = {f"{job}+0": "COMPLETED", f"{job}+1": "COMPLETED"}
    wait_until(lambda: states() == completed, 40, f"job {job} to complete: {states()}")
    assert sorted(output.read_text().splitlines()) == [
        "components 2",
        "first 0/2",
        "first 1/2",
        "second 0/1",
    ]


def test_up_changes_nothing_that_is_up(slurm_cluster: SlurmSandbox) -> None:
    before = processes(slurm_cluster)
    printed = slurm_cluster("up")
    assert printed == f"export SLURM_CONF={slurm_cluster.slurm_conf}\n"
    assert printed == slurm_cluster("env")
    assert processes(slurm_cluster) == before


def test_killed_node_goes_down_and_comes_back(slurm_cluster: SlurmSandbox) -> None:
    run("srun", "--nodelist=node3", "true")
    init = processes(slurm_cluster)["node3"]
    slurm_cluster("kill-node", 3)
    assert not is_alive(init)
    assert slurm_cluster.try_command("in-node", 3, "true").returncode == 1
    assert slurm_cluster.try_command("status").returncode == 1
    wait_until(lambda: node_state("node3").startswith("down"), 60, "node3 to be down")
    slurm_cluster("start-node", "node3")
    assert run("srun", "--nodelist=node3", "hostname") == "node3\n"
    assert slurm_cluster.try_command("status").returncode == 0


def test_cut_node_lives_but_cannot_be_reached(slurm_cluster: SlurmSandbox) -> None:
    connect = "import socket; socket.create_connection(('node1', 16818), 1)"  # slurmd's port

    def reaches_node1() -> bool:
        return slurm_cluster.try_command("in-node", 4, "python3", "-c", connect).returncode == 0

    assert reaches_node1()
    slurm_cluster("cut-node", 4)
    try:
        assert not reaches_node1()
        assert slurm_cluster("in-node", 4, "hostname") == "node4\n"
    finally:
        slurm_cluster("heal-node", 4)
    wait_until(reaches_node1, 10, "the network of node4")
    assert run("srun", "--nodelist=node4", "hostname") == "node4\n"


# ----------------------------------------------------------------------- a second one, from scratch


@pytest.fixture
def second(tmp_path: Path) -> Iterator[SlurmSandbox]:
    sandbox = SlurmSandbox(tmp_path / "sandbox")
    yield sandbox
    sandbox("down", "--clean")


SMALL = ("--instance=1", "--nodes=2", "--memory=1000")


def processes(sandbox: SlurmSandbox) -> dict[str, int]:
    """Process ids by name, as the sandbox remembers them."""
    files = (sandbox.directory / "run").glob("*.json")
    return {file.stem: json.loads(file.read_text())["pid"] for file in files}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # its parent may be slow to notice


def srun(sandbox: SlurmSandbox, *arguments: str) -> list[str]:
    environment = {**os.environ, "SLURM_CONF": str(sandbox.slurm_conf)}
    return sorted(
        subprocess.run(
            ["srun", *arguments],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
        ).stdout.split()
    )


def assert_nothing_left(sandbox: SlurmSandbox, pids: list[int]) -> None:
    assert [pid for pid in pids if is_alive(pid)] == []
    marker = f"SLURM_CONF={sandbox.slurm_conf}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile, or is the kernel's
            continue
        assert marker not in environment, (entry / "cmdline").read_text()
    assert "slurmbr1" not in run("ip", "-brief", "link")
    assert str(sandbox.directory) not in Path("/proc/mounts").read_text()
    assert not (sandbox.directory / "dev").exists()


def test_twice_from_a_clean_stop_and_after_a_crash(second: SlurmSandbox) -> None:
    second("up", "--clean", *SMALL)
    assert srun(second, "--nodes=2", "hostname") == ["node1", "node2"]
    pids = list(processes(second).values())
    assert len(pids) == 6  # munged, mariadbd, slurmdbd, slurmctld, two nodes
    second("down")
    assert_nothing_left(second, pids)

    second("up", *SMALL)
    assert srun(second, "--nodes=2", "hostname") == ["node1", "node2"]

    # The machine loses power: pid files, sockets, the bridge and the device files stay.
    pids = list(processes(second).values())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)), 10, "the killed daemons to end")
    # ... and after the reboot one of the remembered pids is somebody else's.
    record = second.directory / "run/slurmctld.json"
    record.write_text(json.dumps({"pid": os.getpid(), "start_time": 1}))
    assert second.try_command("status").returncode == 1
    second("up", *SMALL)
    assert srun(second, "--nodes=2", "hostname") == ["node1", "node2"]
    pids = list(processes(second).values())
    second("down", "--clean")
    assert_nothing_left(second, pids)
    assert not second.directory.exists()


def test_without_namespaces(second: SlurmSandbox) -> None:
    second("up", *SMALL, "--mode=plain", "--no-accounting")
    name = ("bash", "-c", "echo $SLURMD_NODENAME")
    assert srun(second, "--nodes=2", *name) == ["node1", "node2"]
    assert second.try_command("cut-node", 1).returncode == 1
    pids = list(processes(second).values())
    second("kill-node", 2)
    second("start-node", 2)
    assert srun(second, "--nodelist=node2", *name) == ["node2"]
    pids += processes(second).values()
    second("down")
    assert_nothing_left(second, pids)


def test_other_settings_need_a_stop(second: SlurmSandbox) -> None:
    second("up", *SMALL, "--no-accounting")
    refused = second.try_command("up", *SMALL, "--no-accounting", "--gpus=1")
    assert refused.returncode == 1
    assert "down" in refused.stderr
