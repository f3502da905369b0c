"""The correctness table: every family at every layout against Hugging Face in float32."""

import re
from pathlib import Path

import pytest

from hpc_rlhf.config import Recompute
from tests.distributed.correctness import (
    BOUND,
    LAYOUTS,
    Difference,
    Layout,
    Reference,
    measure,
    reference,
    table_rows,
)
from tests.distributed.ranks import run_ranks
from tests.tiny_models import TINY_MODELS

pytestmark = pytest.mark.distributed

TABLE = Path(__file__).parents[2] / "docs" / "correctness.md"


@pytest.fixture(scope="module")
def references(tiny_models: dict[str, Path]) -> dict[str, Reference]:
    return {name: reference(directory) for name, directory in tiny_models.items()}


def assert_within_bound(differences: dict[str, Difference]) -> None:
    assert differences.keys() == TINY_MODELS.keys()
    for name, difference in differences.items():
        assert difference.logits <= BOUND, name
        assert difference.gradients <= BOUND, name
        # The bound means something only beside values far above it.
        assert difference.logits_scale > 1.0, name
        assert difference.gradients_scale > 1e-2, name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logits_and_gradients(layout: Layout, references: dict[str, Reference]) -> None:
    for differences in run_ranks(measure, layout.ranks, layout, references):
        assert_within_bound(differences)


@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL])
def test_recomputation_changes_nothing(
    recompute: Recompute, references: dict[str, Reference]
) -> None:
    layout = Layout(tensor=2, pipeline=1, data=1, sequence=True)
    for differences in run_ranks(measure, layout.ranks, layout, references, recompute):
        assert_within_bound(differences)


def test_documented_table_has_every_row() -> None:
    documented = re.findall(
        r"^\| (\S+) \| (\d+) \| (\d+) \| (\d+) \| (yes|no) \|", TABLE.read_text(), re.MULTILINE
    )
    assert documented == table_rows(TINY_MODELS)
