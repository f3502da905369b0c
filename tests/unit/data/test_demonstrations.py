from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_rlhf.config import DataConfig
from hpc_rlhf.data.demonstrations import batches, load_demonstrations
from hpc_rlhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def test_the_completion_and_its_end_are_learned(
    tmp_path: Path, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "3+5=", "completion": "8"}\n')
    (demonstration,) = load_demonstrations(path, DataConfig(), tokenizer)
    ids = demonstration.token_ids.tolist()
    assert tokenizer.decode(ids) == "3+5=8<eos>"
    assert demonstration.loss_mask.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("completion", ["", ', "completion": ""', ', "completion": 8'])
def test_a_record_without_completion_is_named(
    tmp_path: Path, tokenizer: "PreTrainedTokenizerBase", completion: str
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(
        '{"prompt": "a", "completion": "b"}\n' + '{"prompt": "3+5="' + completion + "}\n"
    )
    with pytest.raises(UserError, match=r"d\.jsonl:2: 'completion' must be text"):
        load_demonstrations(path, DataConfig(), tokenizer)


def test_batches_go_through_all_in_every_epoch(
    tmp_path: Path, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}", "completion": "x"}}\n' for i in range(5)))
    demonstrations = load_demonstrations(path, DataConfig(), tokenizer)
    drawn = [id(d) for batch in islice(batches(demonstrations, 3, seed=0), 5) for d in batch]
    assert all(drawn.count(id(d)) == 3 for d in demonstrations)
    again = [id(d) for batch in islice(batches(demonstrations, 3, seed=0), 5) for d in batch]
    other = [id(d) for batch in islice(batches(demonstrations, 3, seed=1), 5) for d in batch]
    assert drawn == again != other
