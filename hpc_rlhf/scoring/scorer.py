"""Where rewards come from, as the loop sees it."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.scoring.verifiers import VerifierPool
from hpc_rlhf.types import Rollout, Scores


class Scoring(Protocol):
    """Scores that are on their way."""

    def wait(self) -> None:
        """Wait for what is done elsewhere, whatever becomes of it; it is looked at by :meth:`result`."""
        ...

    def result(self) -> Scores:
        """The scores, the same on every rank. Collective over the learner.

        Raises:
            ComponentError: too many samples could not be scored.
        """
        ...


class Scorer(Protocol):
    """Rewards of a batch of rollouts.

    In two calls, because scoring may go on elsewhere (in verifier processes, in a service) while the
    learner sweeps the same rollouts.
    """

    def start(self, rollouts: Sequence[Rollout]) -> Scoring:
        """Begin to score ``rollouts``, the same on every rank. Collective over the learner."""
        ...

    def memory(self) -> dict[str, float]:
        """Bytes that it holds on this rank's device, as metrics; none if it is elsewhere."""
        ...

    def close(self) -> None: ...


class VerifierScorer:
    """Verifiers in processes of the coordinator, which work while the learner sweeps."""

    def __init__(self, pool: VerifierPool | None, control: ControlGroup) -> None:
        """Args:
        pool: on the coordinator.
        """
        self._pool = pool
        self._control = control
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")

    def start(self, rollouts: Sequence[Rollout]) -> Scoring:
        future = self._thread.submit(self._pool.score, rollouts) if self._pool else None
        return _Verifying(future, self._control)

    def memory(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        if self._pool is not None:
            self._pool.close()


@dataclass(frozen=True)
class _Verifying:
    future: "Future[Scores] | None"  # on the coordinator
    control: ControlGroup

    def wait(self) -> None:
        if self.future is not None:
            wait([self.future])

    def result(self) -> Scores:
        scores = self.control.broadcast(self.future.result() if self.future else None)
        assert scores is not None
        return scores
