"""Nodes that answer, that stop answering, and that never did. The network is this machine's own."""

import socket
import time
from collections.abc import Iterator

import pytest

from hpc_rlhf.launch import node_watch
from hpc_rlhf.launch.node_watch import NodeWatch

SILENT_S = 0.6


class Port:
    """Answers a connection, until its queue is full: then the kernel drops what asks for one."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.number: int = self._socket.getsockname()[1]
        self._waiting: list[socket.socket] = []

    def fall_silent(self) -> None:
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", self.number))
            self._waiting.append(client)

    def close(self) -> None:
        for client in (*self._waiting, self._socket):
            client.close()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    port = Port()
    monkeypatch.setattr(node_watch, "PERIOD_S", 0.1)
    monkeypatch.setattr(node_watch, "PROBED_PORT", port.number)
    yield port
    port.close()


def look(watch: NodeWatch, seconds: float) -> list[str]:
    """What was lost within so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if lost := watch.lost():
            return lost
        time.sleep(0.01)
    return []


def test_a_node_that_refuses_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "PERIOD_S", 0.05)
    watch = NodeWatch(["localhost", "no-such-node.invalid"], silent_s=0.2)
    assert look(watch, 0.6) == []
    watch.close()


def test_a_node_that_does_not_answer_any_more_is_lost(port: Port) -> None:
    watch = NodeWatch(["127.0.0.1"], silent_s=SILENT_S)
    began = time.monotonic()
    assert look(watch, 0.3) == []
    assert watch.all_answered(began)
    port.fall_silent()
    began = time.monotonic()
    assert not watch.all_answered(began)
    assert look(watch, 5) == ["127.0.0.1"]
    assert time.monotonic() - began < SILENT_S + 0.4
    watch.close()


def test_no_node_is_lost_while_nobody_asks(port: Port) -> None:
    """The one who watches hung, in a filesystem say, for longer than a node may be silent."""
    clock = [0.0]
    watch = NodeWatch(["127.0.0.1"], silent_s=SILENT_S, now=lambda: clock[0])
    assert look(watch, 1.0) == []
    clock[0] += 100
    assert watch.lost() == []
    port.fall_silent()
    clock[0] += node_watch.PERIOD_S
    watch.lost()
    clock[0] += SILENT_S + node_watch.PERIOD_S
    assert watch.lost() == ["127.0.0.1"]
    watch.close()


def test_a_node_that_never_answered_may_have_a_firewall(port: Port) -> None:
    port.fall_silent()
    watch = NodeWatch(["127.0.0.1"], silent_s=0.2)
    began = time.monotonic()
    assert look(watch, 0.8) == []
    assert watch.all_answered(began)
    watch.close()


def test_a_firewall_that_has_had_enough_is_no_loss(port: Port) -> None:
    """slurmd's port is asked before a node is lost; here the kernel answers for it."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        slurmd = unused.getsockname()[1]
    watch = NodeWatch(["127.0.0.1"], silent_s=SILENT_S, confirm_port=slurmd)
    assert look(watch, 0.3) == []
    port.fall_silent()
    assert look(watch, 3 * SILENT_S) == []
    watch.close()
