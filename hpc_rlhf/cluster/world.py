"""Who this process is: the environment, parsed once into a frozen :class:`World`."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_rlhf.errors import ComponentError

LOCAL_JOB = "local"
"""``World.job_id`` outside of Slurm; the local launcher makes it unique: ``local-PID``."""

LOCAL_VARIABLES = {
    "rank": "HPC_RLHF_RANK",
    "size": "HPC_RLHF_SIZE",
    "local_rank": "HPC_RLHF_LOCAL_RANK",
    "node": "HPC_RLHF_NODE",
    "job_id": "HPC_RLHF_JOB_ID",
}
"""What the local launcher sets for every process."""

STEP_VARIABLES = {"component": "HPC_RLHF_COMPONENT", "attempt": "HPC_RLHF_ATTEMPT"}
"""What both launchers set: Slurm gives a task no name of its own step or het group."""

_SLURM_VARIABLES = {
    "rank": "SLURM_PROCID",
    "size": "SLURM_NTASKS",
    "local_rank": "SLURM_LOCALID",
    "node": "SLURMD_NODENAME",
    "job_id": "SLURM_JOB_ID",  # the leader's, in every component of a heterogeneous job
}


@dataclass(frozen=True)
class World:
    """One process in the world of its step: a component's ranks are 0 <= rank < size."""

    component: str
    rank: int
    size: int
    local_rank: int
    node: str
    job_id: str
    attempt: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "World":
        """Read the local launcher's variables, else those of the Slurm step.

        The local launcher's come first: inside a batch script ``SLURM_PROCID`` is set as well, and
        is the script's own.

        Raises:
            ComponentError: the process was started by neither.
        """
        names = LOCAL_VARIABLES if LOCAL_VARIABLES["rank"] in environ else _SLURM_VARIABLES
        names = {**names, **STEP_VARIABLES}
        missing = [name for name in names.values() if name not in environ]
        if missing:
            raise ComponentError(
                f"not started by a launcher of hpc-rlhf: {', '.join(missing)} not set "
                "(components are started by `hpc-rlhf run` or `hpc-rlhf submit`)"
            )
        value = {field: environ[name] for field, name in names.items()}
        return cls(
            component=value["component"],
            rank=int(value["rank"]),
            size=int(value["size"]),
            local_rank=int(value["local_rank"]),
            node=value["node"],
            job_id=value["job_id"],
            attempt=int(value["attempt"]),
        )

    def address(self, interface: str | None = None) -> str:
        """IP address of this node that the peers can reach.

        Args:
            interface: network interface to take it from ("ib0", "hsn0"); default: what the node's
                name resolves to, 127.0.0.1 under the local launcher.

        Raises:
            ComponentError: the interface does not exist here or has no address, or the node's
                name does not resolve.
        """
        if interface is not None:
            return _interface_address(interface, self.node)
        if self.job_id.startswith(LOCAL_JOB):
            return "127.0.0.1"
        for name in (self.node, socket.gethostname()):
            try:
                found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            except socket.gaierror:
                continue
            found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # IPv4 first
            for *_, sockaddr in found:
                # a node's own name often resolves to loopback on that node (Debian's 127.0.1.1)
                if not _is_loopback(str(sockaddr[0])):
                    return str(sockaddr[0])
        raise ComponentError(
            f"node {self.node} has no address that peers can reach: its name resolves to nothing "
            "but loopback; set cluster.network_interface"
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _interface_address(interface: str, node: str) -> str:
    import psutil

    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise ComponentError(
            f"cluster.network_interface={interface}: node {node} has no such interface, "
            f"only {', '.join(sorted(interfaces))}"
        )
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in interfaces[interface]:
            if entry.family == family:
                return entry.address.split("%")[0]
    raise ComponentError(f"cluster.network_interface={interface} has no IP address on node {node}")
