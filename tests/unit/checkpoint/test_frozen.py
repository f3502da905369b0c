"""Identity of frozen models: any changed byte is refused, and known files are not read again."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_rlhf.checkpoint import frozen
from hpc_rlhf.errors import UserError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "reference-7b"
    directory.mkdir()
    (directory / "model-00002.safetensors").write_bytes(b"second")
    (directory / "model-00001.safetensors").write_bytes(b"first")
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read."""
    names: list[str] = []
    real = frozen.file_sha256

    def counting(path: Path, **options: Any) -> str:
        names.append(path.name)
        return real(path, **options)

    monkeypatch.setattr(frozen, "file_sha256", counting)
    return names


def test_digest_is_of_the_files_digests_by_name(model: Path, cache: Path) -> None:
    ref = frozen.digest_model("reference", model, cache=cache)
    each = [hashlib.sha256(content).hexdigest() for content in (b"first", b"second")]
    assert ref.sha256 == hashlib.sha256("".join(each).encode()).hexdigest()
    assert (ref.role, ref.name, ref.path) == ("reference", "reference-7b", str(model))
    (model / "config.json").write_text('{"changed": true}')
    assert frozen.digest_model("reference", model, cache=cache) == ref


def test_known_files_are_not_read_again(model: Path, cache: Path, reads: list[str]) -> None:
    ref = frozen.digest_model("reference", model, cache=cache)
    assert sorted(reads) == ["model-00001.safetensors", "model-00002.safetensors"]
    reads.clear()
    frozen.verify(ref, cache=cache)
    assert reads == []
    frozen.verify(ref, cache=cache, recompute=True)
    assert len(reads) == 2


def test_a_touched_file_is_read_again_alone(model: Path, cache: Path, reads: list[str]) -> None:
    ref = frozen.digest_model("reference", model, cache=cache)
    reads.clear()
    os.utime(model / "model-00001.safetensors", ns=(1, 1))
    frozen.verify(ref, cache=cache)
    assert reads == ["model-00001.safetensors"]


def test_a_replaced_file_of_equal_size_and_time_is_noticed(model: Path, cache: Path) -> None:
    ref = frozen.digest_model("reference", model, cache=cache)
    file = model / "model-00001.safetensors"
    stat = file.stat()
    other = model / "other"
    other.write_bytes(b"fIrst")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, file)
    with pytest.raises(UserError) as raised:
        frozen.verify(ref, cache=cache)
    found = frozen.digest_model("reference", model, cache=cache).sha256
    assert ref.sha256 in str(raised.value)
    assert found in str(raised.value)
    assert found != ref.sha256


def test_a_change_in_place_that_keeps_size_and_time_needs_the_full_check(
    model: Path, cache: Path
) -> None:
    ref = frozen.digest_model("reference", model, cache=cache)
    file = model / "model-00001.safetensors"
    stat = file.stat()
    file.write_bytes(b"fIrst")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    frozen.verify(ref, cache=cache)
    with pytest.raises(UserError, match="changed since the run began"):
        frozen.verify(ref, cache=cache, recompute=True)
    with pytest.raises(UserError, match="changed since the run began"):
        frozen.verify(ref, cache=cache)  # the full check renewed the cache


def test_missing_models_are_refused(model: Path, cache: Path) -> None:
    ref = frozen.digest_model("reference", model, cache=cache)
    for file in model.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        frozen.verify(ref, cache=cache)
    (model / "config.json").unlink()
    model.rmdir()
    with pytest.raises(UserError, match=f"is missing; expected .*{ref.sha256}"):
        frozen.verify(ref, cache=cache)


def test_a_useless_cache_costs_time_only(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, impossible = tmp_path / "broken.json", tmp_path / "file" / "digests.json"
    broken.write_text("{")
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        digests = {
            frozen.digest_model("reference", model, cache=path).sha256
            for path in (broken, impossible, tmp_path / "fresh.json")
        }
    assert len(digests) == 1
    assert "ignored" in caplog.text
    assert "not written" in caplog.text
    assert len(json.loads(broken.read_text())) == 2


def test_default_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert frozen.default_cache() == tmp_path / "hpc-rlhf" / "digests.json"
