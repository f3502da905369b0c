import socket

import pytest

from hpc_rlhf.cluster.world import World
from hpc_rlhf.errors import ComponentError

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "node2",
    "SLURM_JOB_ID": "12",
    "HPC_RLHF_COMPONENT": "learner",
    "HPC_RLHF_ATTEMPT": "5",
}
LOCAL = {
    "HPC_RLHF_RANK": "0",
    "HPC_RLHF_SIZE": "2",
    "HPC_RLHF_LOCAL_RANK": "0",
    "HPC_RLHF_NODE": "laptop",
    "HPC_RLHF_JOB_ID": "local-77",
}


def test_slurm_step() -> None:
    assert World.from_environment(SLURM) == World("learner", 3, 4, 1, "node2", "12", 5)


def test_local_launcher_comes_before_the_batch_script_it_may_run_in() -> None:
    world = World.from_environment({**SLURM, **LOCAL})
    assert world == World("learner", 0, 2, 0, "laptop", "local-77", 5)


def test_started_by_no_launcher() -> None:
    with pytest.raises(ComponentError, match=r"SLURM_PROCID.*HPC_RLHF_ATTEMPT not set"):
        World.from_environment({"SLURM_JOB_ID": "12"})


def test_address() -> None:
    local = World.from_environment({**SLURM, **LOCAL})
    assert local.address() == "127.0.0.1"
    assert local.address("lo") == "127.0.0.1"
    with pytest.raises(ComponentError, match=r"network_interface=ib7: node laptop.* only .*lo"):
        local.address("ib7")


def _resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def getaddrinfo(name: str, *_: object, **__: object) -> list:
        if name != "node2":
            raise socket.gaierror
        return [
            (socket.AF_INET6 if ":" in a else socket.AF_INET, None, 0, "", (a, 0))
            for a in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_address_of_a_name_skips_loopback_and_prefers_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.from_environment(SLURM)
    _resolve_to(monkeypatch, "127.0.1.1", "fd00::2", "10.1.0.2")
    assert world.address() == "10.1.0.2"
    _resolve_to(monkeypatch, "::1", "fd00::2")
    assert world.address() == "fd00::2"
    _resolve_to(monkeypatch, "127.0.1.1")
    with pytest.raises(ComponentError, match=r"node2 has no address.*cluster\.network_interface"):
        world.address()
