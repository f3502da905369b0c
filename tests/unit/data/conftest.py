from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_rlhf.data.chat import load_tokenizer
from hpc_rlhf.data.tiny import write_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, max_positions=512)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> "PreTrainedTokenizerBase":
    return load_tokenizer(tokenizer_directory)
