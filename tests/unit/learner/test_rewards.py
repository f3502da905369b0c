"""Reward shaping and the KL coefficient over time, by hand."""

import pytest

from hpc_rlhf.config import KlConfig
from hpc_rlhf.learner.kl_control import KlController
from hpc_rlhf.learner.rewards import overlong_penalty


def test_soft_overlong_punishment() -> None:
    """DAPO's eq. 13 with L_max = 20, L_cache = 8."""
    got = overlong_penalty([5, 12, 14, 18, 20], 20, 8, 0.5)
    assert got.tolist() == [0.0, 0.0, -0.125, -0.375, -0.5]


def test_fixed_coefficient_stays() -> None:
    controller = KlController.of(KlConfig(coef=0.05))
    assert controller.after(100.0) == controller


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (0.0, 0.98), (-3.0, 0.98)],
)
def test_adaptive_coefficient(kl: float, factor: float) -> None:
    """Ziegler et al.: the error is clipped to 0.2, the gain is 0.1."""
    controller = KlController.of(KlConfig(coef=0.5, target=6.0, gain=0.1))
    assert controller.after(kl).coef == pytest.approx(0.5 * factor)


def test_adaptive_coefficient_finds_its_target() -> None:
    """Where the KL falls with the coefficient, as kl = 1 / coef does."""
    controller = KlController(coef=1.0, target=10.0)
    for _ in range(400):
        controller = controller.after(1.0 / controller.coef)
    assert 1.0 / controller.coef == pytest.approx(10.0, rel=0.01)
