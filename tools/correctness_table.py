"""Measures the correctness table and writes it into docs/correctness.md.

Run from the repository's root: ``python -m tools.correctness_table``.
"""

import tempfile
from pathlib import Path

from hpc_rlhf.fs import publish_text
from tests.distributed.correctness import LAYOUTS, Difference, measure, reference, table_rows
from tests.distributed.ranks import run_ranks
from tests.tiny_models import TINY_MODELS, make

DOCUMENT = Path(__file__).parents[1] / "docs" / "correctness.md"
START, END = "<!-- table: python -m tools.correctness_table -->", "<!-- end of table -->"
HEADER = """\
| model | TP | PP | DP | SP | logits, max difference | gradients, max difference |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        references = {n: reference(make(n, Path(directory) / n)) for n in TINY_MODELS}
        measured = [run_ranks(measure, layout.ranks, layout, references)[0] for layout in LAYOUTS]
    differences = [by_model[name] for name in TINY_MODELS for by_model in measured]
    rows = "".join(
        f"| {' | '.join(row)} | {difference.logits:.1e} | {difference.gradients:.1e} |\n"
        for row, difference in zip(table_rows(TINY_MODELS), differences, strict=True)
    )
    before, rest = DOCUMENT.read_text().split(START)
    after = rest.split(END)[1]
    publish_text(DOCUMENT, f"{before}{START}\n{HEADER}{rows}\n{scales(differences)}\n{END}{after}")


def scales(differences: list[Difference]) -> str:
    logits = max(difference.logits_scale for difference in differences)
    gradients = max(difference.gradients_scale for difference in differences)
    return f"The largest logit is {logits:.2g}, the largest element of a gradient {gradients:.2g}."


if __name__ == "__main__":
    main()
