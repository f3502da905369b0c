"""Files of a reference's log-probs in the cache."""

from pathlib import Path

import numpy as np
import pytest

from hpc_rlhf.errors import UserError
from hpc_rlhf.learner.reference import ReferenceFile
from hpc_rlhf.types import FrozenRef


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    model = FrozenRef(role="reference", name="m", sha256="m", path="/m")
    file = ReferenceFile.of(tmp_path, model, "data", "float32")
    assert file.read() is None
    values = np.array([[-1.5, -2.0]])
    file.write(values, whole=True)
    assert np.array_equal(file.read(), values)
    file.path.write_bytes(file.path.read_bytes()[:-8])
    with pytest.raises(UserError, match=rf"{file.path}: .*damaged .*; delete this file"):
        file.read()
