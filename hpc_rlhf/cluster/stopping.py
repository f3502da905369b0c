"""Whether to stop at a save point: for a signal to any rank, or for the end of the walltime."""

import logging
from collections.abc import Callable

from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.cluster.signals import StopFlag
from hpc_rlhf.cluster.walltime import WalltimeGuard

logger = logging.getLogger(__name__)


class StopRequested(Exception):
    """All ranks agreed to stop at this save point, whatever for; what is to be kept is on disk."""


class SavePoints:
    """Asked by all ranks at every point where the state could be saved; all get the same answer.

    Example:
        >>> if save_points.stop_before(Phase.TRAIN, Phase.SYNC):
        ...     raise StopRequested
    """

    def __init__(
        self,
        flag: StopFlag,
        control: ControlGroup,
        guard: WalltimeGuard | None,
        announce: Callable[[str], None],
    ) -> None:
        """Args:
        flag: of this process.
        guard: the coordinator's; None elsewhere: the ranks would not agree on the time.
        announce: told the reason when the guard asks for the stop, before anybody stops.
        """
        self._flag = flag
        self._control = control
        self._guard = guard
        self._announce = announce

    def stop_before(self, *phases: str) -> bool:
        """Whether to stop rather than begin ``phases``; of none, rather than go on at all.

        Collective over the learner. Once True it stays so.
        """
        guard = self._guard
        if guard is not None and not self._flag.requested and guard.out_of_time(*phases):
            reason = guard.why(*phases)
            logger.warning("stopping, %s", reason)
            self._announce(reason)
            self._flag.request(reason)
        return self._control.any(self._flag.requested)
