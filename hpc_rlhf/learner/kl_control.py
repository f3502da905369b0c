"""The coefficient of the KL penalty over time. Pure."""

from dataclasses import dataclass, replace

from hpc_rlhf.config import KlConfig

_MAX_ERROR = 0.2


@dataclass(frozen=True, slots=True)
class KlController:
    """The coefficient of the next step: fixed, or held so that the KL comes to a target.

    Adaptive, after a step whose samples had ``kl``: ``e = clip(kl / target - 1, -0.2, 0.2)`` and
    ``coef <- coef (1 + gain e)``. Ziegler et al., arXiv:1909.08593, sec. 2.2 (gain 0.1).
    """

    coef: float
    target: float | None = None  # nats a completion; None: the coefficient is fixed
    gain: float = 0.1

    @classmethod
    def of(cls, config: KlConfig) -> "KlController":
        """The controller that a run begins with."""
        return cls(config.coef, config.target, config.gain)

    def after(self, kl: float) -> "KlController":
        """The controller for the step after one whose completions had the mean KL ``kl``."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -_MAX_ERROR), _MAX_ERROR)
        return replace(self, coef=self.coef * (1.0 + self.gain * error))
