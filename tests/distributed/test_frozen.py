"""The digest of a frozen model by all ranks: the same as by one, and each file read once."""

import hashlib
from pathlib import Path

import pytest

from hpc_rlhf.checkpoint import frozen
from hpc_rlhf.cluster.control import ControlGroup
from hpc_rlhf.errors import ComponentError, UserError
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

CONTENTS = {"a": b"1" * 900, "b": b"2" * 500, "c": b"3" * 300, "d": b"4" * 200}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    for name, content in CONTENTS.items():
        (directory / f"{name}.safetensors").write_bytes(content)
    return directory


def test_each_rank_reads_its_share_and_known_files_are_not_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [hashlib.sha256(content).hexdigest() for content in CONTENTS.values()]
    expected = hashlib.sha256("".join(digests).encode()).hexdigest()
    cache = tmp_path / "digests.json"

    def together() -> list[list[str]]:
        control = ControlGroup(30)
        hashing, reads = frozen.file_sha256, []

        def recording(path: Path, **options: object) -> str:
            reads[-1].append(path.stem)
            return hashing(path)

        monkeypatch.setattr(frozen, "file_sha256", recording)
        for touched in (None, "b", None):
            if touched and control.is_coordinator:
                (model / f"{touched}.safetensors").write_bytes(CONTENTS[touched])
            reads.append([])
            ref = frozen.digest_model_together("reference", model, control, cache=cache)
            assert ref.sha256 == expected
        return reads

    assert run_ranks(together, 2) == [[["a"], ["b"], []], [["b", "c", "d"], [], []]]
    assert frozen.digest_model("reference", model, cache=cache).sha256 == expected


def test_what_is_wrong_is_raised_on_every_rank(model: Path, tmp_path: Path) -> None:
    def together() -> str:
        control = ControlGroup(30)
        with pytest.raises((UserError, ComponentError)) as raised:
            frozen.digest_model_together(
                "reference", model, control, cache=tmp_path / "digests.json"
            )
        return f"{raised.type.__name__}: {raised.value}"

    file = model / "c.safetensors"
    file.unlink()
    file.mkdir()  # cannot be read, by root either
    for message in run_ranks(together, 2):
        assert message == f"ComponentError: learner rank 0: reference model {file}: Is a directory"
    file.rmdir()
    for file in model.iterdir():
        file.unlink()
    for message in run_ranks(together, 2):
        assert message.startswith(f"UserError: reference model {model}: no *.safetensors file")
