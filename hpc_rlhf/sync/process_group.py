"""A process group outside the default world: one learner rank and the workers of the samplers.

Learner and samplers are different programs that start and die on their own, so they cannot share
``torch.distributed``'s default world. Both sides of a transfer use this module; it needs torch only.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class TransferError(RuntimeError):
    """A peer of the transfer group is gone, late, or sent something else than announced."""


class TransferGroup:
    """A group in which rank 0, a learner rank, broadcasts to the workers of the samplers.

    Every operation is bounded by ``timeout_s``. A group that has failed once is of no further use:
    close it and form another one under another name.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        address: str,
        timeout_s: float,
        join_timeout_s: float | None = None,
    ) -> None:
        """Join the group: blocks until all its members are there.

        Args:
            host, port: of the learner's TCPStore.
            name: unique to this forming of the group; a store keeps the keys of dead groups.
            rank: 0 sends.
            device: where the tensors live; CUDA means NCCL, CPU means gloo.
            address: of this node, for gloo to listen on.
            timeout_s: of one broadcast.
            join_timeout_s: of the wait for the other members; default: ``timeout_s``.

        Raises:
            TransferError: a member did not come in time.
        """
        self.rank, self.size, self.device = rank, size, device
        self._name, self._timeout_s = name, timeout_s
        timeout = timedelta(seconds=join_timeout_s or timeout_s)
        try:
            # A client of its own: a wait blocks every other user of the same client.
            self._tcp = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
            store = PrefixStore(name, self._tcp)
            _meet(store, rank, size, timeout)
            self._backend: Any
            if device.type == "cpu":
                self._backend = _gloo(store, rank, size, address, timeout)
            else:
                self._backend = _nccl(store, rank, size, timeout)
            # NCCL connects at the first collective: let it do so here, under this message.
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))
        except (RuntimeError, ValueError) as error:  # torch.distributed's errors, TransferError
            raise TransferError(
                f"transfer group {name} of {size} members did not form: {error}"
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send ``tensor`` from rank 0 to all the others, which receive it in place.

        Raises:
            TransferError: a member has died, or the operation took longer than ``timeout_s``.
        """
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._timeout_s)  # gloo's; NCCL has it of wait()
        work = None
        try:
            work = self._backend.broadcast([tensor], options)
            if tensor.device.type == "cpu":
                work.wait()
            else:
                work.wait(options.timeout)  # the host waits, see _nccl
        except RuntimeError as error:
            raise TransferError(f"{self._name} rank {self.rank}/{self.size}: {error}") from error
        finally:
            del work  # it keeps gloo's connections open, and the exception keeps this frame

    def close(self) -> None:
        """Drop the connections. Peers that still wait fail at once (gloo) or in time (NCCL)."""
        if self.device.type != "cpu":
            self._backend.abort()
        del self._backend


def _meet(store: PrefixStore, rank: int, size: int, timeout: timedelta) -> None:
    """Wait for all members in the store, because NCCL waits for a missing one without a bound."""
    store.set(f"member/{rank}", "here")
    store.wait([f"member/{member}" for member in range(size)], timeout)


def _gloo(store: PrefixStore, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # missing in its stubs
    # By address: gloo's default is what the host name resolves to, often loopback on the node.
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: PrefixStore, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Read by the constructor. Errors and timeouts are then raised by wait(), and there is no watchdog
    # thread, which would end the whole process, a learner or a sampler, when a peer dies.
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[_BLOCKING_WAIT]
        if before is not None:
            os.environ[_BLOCKING_WAIT] = before
