"""How the processes of an attempt find each other: small published files in its directory.

Every server binds port 0 and publishes what it got, so there is no race for ports, and no address
is guessed from a node list.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_rlhf.cluster.world import World
from hpc_rlhf.errors import WaitTimeout
from hpc_rlhf.fs import publish_json, read_json
from hpc_rlhf.run_dir import Attempt

if TYPE_CHECKING:
    from torch.distributed import TCPStore

T = TypeVar("T")

_MAX_POLL_S = 1.0


@dataclass(frozen=True)
class Endpoint:
    """A server of this attempt, as it published itself once it was healthy."""

    component: str
    replica: int
    url: str
    host: str
    pid: int
    incarnation: str  # unique to one process: a restarted replica has another one
    job_id: str
    attempt: int
    started: float  # Unix time
    # of its start, and no part of who it is:
    startup: Mapping[str, float] = field(default_factory=dict, compare=False)  # seconds by part
    first_token: float | None = field(default=None, compare=False)  # Unix time of the first one


def endpoint_path(attempt: Attempt, component: str, replica: int) -> Path:
    return attempt.endpoints / f"{component}-{replica}.json"


def publish_endpoint(attempt: Attempt, endpoint: Endpoint) -> None:
    """Publish ``endpoint`` in the place of its replica's former incarnation."""
    path = endpoint_path(attempt, endpoint.component, endpoint.replica)
    publish_json(path, asdict(endpoint))


def read_endpoints(attempt: Attempt, component: str) -> list[Endpoint]:
    """Return the published endpoints of ``component``, sorted by replica.

    One of a dead server can be among them until the supervisor removes it.
    """
    values = (_read_listed(path) for path in attempt.endpoints.glob(f"{component}-*.json"))
    return sorted((Endpoint(**v) for v in values if v is not None), key=lambda e: e.replica)


def wait_for(
    condition: Callable[[], T | None], *, what: str, timeout_s: float, poll_s: float = 0.05
) -> T:
    """Call ``condition`` until it returns something other than None or False, and return that.

    The pauses grow with the time waited (a tenth of it, at most 1 s): thousands of waiting ranks
    must not beat on the metadata server of a parallel filesystem.

    Raises:
        WaitTimeout: ``timeout_s`` seconds went by; the message names ``what``.
    """
    start = time.monotonic()
    while True:
        value = condition()
        if value is not None and value is not False:
            return value
        waited = time.monotonic() - start
        if waited >= timeout_s:
            raise WaitTimeout(f"waited {timeout_s:g} s for {what}")
        pause = min(_MAX_POLL_S, max(poll_s, waited / 10))
        time.sleep(max(0.0, min(pause, timeout_s - waited)))


def join_learner_world(
    attempt: Attempt, world: World, *, address: str, timeout_s: float
) -> "TCPStore":
    """Return this rank's client of the learner's store; rank 0 serves it.

    Rank 0 binds a free port and publishes ``{host, port}``; the others wait for that file. Pass
    the store on as ``init_process_group(store=PrefixStore("world", store))``.

    Args:
        address: what peers reach this node by; see :meth:`World.address`.
        timeout_s: of the wait for rank 0, and of every operation of the store.

    Raises:
        WaitTimeout: rank 0 did not publish in time.
    """
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=timeout_s)
    path = attempt.endpoints / "learner.json"
    if world.rank == 0:
        store = TCPStore(address, 0, None, True, timeout, wait_for_workers=False)
        publish_json(path, {"host": address, "port": store.port})
        return store
    where = wait_for(
        lambda: _read_listed(path), what=f"learner rank 0 to publish {path}", timeout_s=timeout_s
    )
    return TCPStore(where["host"], where["port"], None, False, timeout, wait_for_workers=False)


def clone_store(store: "TCPStore", timeout_s: float) -> "TCPStore":
    """Return another client of the same store.

    A blocking wait holds its client's lock: whoever waits in a thread of its own needs a client of
    its own, or the whole process waits with it.
    """
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=timeout_s)
    return TCPStore(store.host, store.port, None, False, timeout, wait_for_workers=False)


def _read_listed(path: Path) -> Any | None:
    """Read a published file, None while it is absent.

    The directory is listed first: on NFS a lookup that failed is cached for up to a minute, a
    listing is checked with the server.
    """
    if path.name not in os.listdir(path.parent):
        return None
    try:
        return read_json(path)
    except FileNotFoundError:  # the supervisor removed it in between
        return None
