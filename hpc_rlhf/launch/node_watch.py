"""Which nodes of an attempt are gone, by asking each of them for a TCP connection now and then.

A node that lost its power or its network says nothing: the peers of its processes wait in a collective
for half an hour, and Slurm takes it for down after ``SlurmdTimeout``, five minutes by default. A node
that lives answers, if only by refusing a connection to a port where nobody listens.
"""

import errno
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

PROBED_PORT = 9  # "discard": nobody listens there, the kernel refuses
PERIOD_S = 2.0  # between two probes of a node, and how long one waits for its answer
SILENT_S = 6.0  # of asking without an answer, a node is lost

_ANSWERS = {0, errno.ECONNREFUSED}


@dataclass
class _Node:
    name: str
    address: str
    next_probe: float = 0.0  # monotonic
    last_answer: float | None = None  # monotonic; None: never yet, it may be silent by its firewall
    # Monotonic: when it was first asked after that. Time in which it was not asked is no silence of
    # its own: whoever asks may have hung in a filesystem.
    asked_since: float | None = None
    probe: socket.socket | None = None


class NodeWatch:
    """Nodes that answered once and do not any more. Never blocks; one probe of a node at a time.

    Example:
        >>> watch = NodeWatch(["node1", "node2"])
        >>> while not watch.lost():
        ...     time.sleep(0.05)
    """

    def __init__(
        self,
        nodes: Iterable[str],
        *,
        confirm_port: int | None = None,
        silent_s: float = SILENT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        nodes: names; those that cannot be resolved are not watched.
        confirm_port: one where something listens on every node (slurmd): asked as well before a
            node is lost, in case that a firewall has had enough of the probes.
        """
        self._silent_s = silent_s
        self._confirm_port = confirm_port
        self._now = now
        self._selector = selectors.DefaultSelector()
        self._nodes = [
            _Node(name, address)
            for name in dict.fromkeys(nodes)
            if (address := _resolve(name)) is not None
        ]

    def lost(self) -> list[str]:
        """Probe what is due; return the names of the nodes that are lost."""
        for key, _ in self._selector.select(0):
            self._answered(key.data)
        now = self._now()
        for node in self._nodes:
            if now >= node.next_probe:
                self._send(node, now)
        return [node.name for node in self._nodes if self._is_lost(node, now)]

    def all_answered(self, since: float) -> bool:
        """Whether every node that ever answered has done so again after ``since`` (monotonic)."""
        return all(n.last_answer is None or n.last_answer > since for n in self._nodes)

    def close(self) -> None:
        for node in self._nodes:
            self._drop(node)
        self._selector.close()

    def _is_lost(self, node: _Node, now: float) -> bool:
        return node.last_answer is not None and self._silence(node, now) > self._silent_s

    @staticmethod
    def _silence(node: _Node, now: float) -> float:
        return 0.0 if node.asked_since is None else now - node.asked_since

    def _send(self, node: _Node, now: float) -> None:
        self._drop(node)
        node.next_probe = now + PERIOD_S
        if node.asked_since is None:
            node.asked_since = now
        silent = node.last_answer is not None and self._silence(node, now) > self._silent_s / 2
        port = self._confirm_port if silent and self._confirm_port else PROBED_PORT
        family = socket.AF_INET6 if ":" in node.address else socket.AF_INET
        node.probe = socket.socket(family, socket.SOCK_STREAM)
        node.probe.setblocking(False)
        result = node.probe.connect_ex((node.address, port))
        if result == errno.EINPROGRESS:
            self._selector.register(node.probe, selectors.EVENT_WRITE, node)
        else:
            self._note(node, result)

    def _answered(self, node: _Node) -> None:
        assert node.probe is not None
        result = node.probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._selector.unregister(node.probe)
        self._note(node, result)

    def _note(self, node: _Node, result: int) -> None:
        if result in _ANSWERS:
            node.last_answer, node.asked_since = self._now(), None
        if node.probe is not None:
            node.probe.close()
            node.probe = None

    def _drop(self, node: _Node) -> None:
        """Forget a probe that was not answered in time."""
        if node.probe is not None:
            self._selector.unregister(node.probe)
            node.probe.close()
            node.probe = None


def _resolve(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
