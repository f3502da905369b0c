"""A checkpoint directory is whole or says which file is not."""

import json
from pathlib import Path

import pytest

from hpc_rlhf.checkpoint import manifest
from hpc_rlhf.checkpoint.save_point import SavePoint


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    directory = tmp_path / "step_3"
    directory.mkdir()
    for name, content in (("__0_0.distcp", b"tensors"), ("state.h5", b"state")):
        (directory / name).write_bytes(content)
    files = [manifest.describe(file) for file in directory.iterdir()]
    manifest.publish_manifest(directory, SavePoint(3, 1), 2, files)
    return directory


def test_a_whole_one_has_no_problem(whole: Path) -> None:
    assert manifest.problem(whole) is None
    assert manifest.problem(whole, digests=True) is None
    read = manifest.read_manifest(whole)
    assert (read.point, read.world_size) == (SavePoint(3, 1), 2)
    assert [(f.name, f.size) for f in read.files] == [("__0_0.distcp", 7), ("state.h5", 5)]


def test_problems_name_the_file(whole: Path) -> None:
    shard = whole / "__0_0.distcp"
    shard.write_bytes(b"tensorS")
    assert manifest.problem(whole) is None
    assert (manifest.problem(whole, digests=True) or "").startswith("__0_0.distcp: sha256")
    shard.write_bytes(b"tensor")
    assert manifest.problem(whole) == "__0_0.distcp: 6 bytes, expected 7"
    shard.unlink()
    assert manifest.problem(whole) == "__0_0.distcp: No such file or directory"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 3}', '{"files": [{"name": "x"}]}'])
def test_a_manifest_that_is_none_is_a_problem(whole: Path, text: str) -> None:
    (whole / manifest.MANIFEST).write_text(text)
    assert (manifest.problem(whole) or "").startswith("manifest.json")


def test_without_a_manifest_the_save_did_not_end(whole: Path) -> None:
    (whole / manifest.MANIFEST).unlink()
    assert "did not end" in (manifest.problem(whole) or "")


def test_save_points_newest_first_and_nothing_else(tmp_path: Path) -> None:
    assert manifest.save_points(tmp_path / "none") == []
    names = ("step_2", "step_10", "step_9+12", "step_9+3", "step_9")
    for name in (*names, ".step_11.tmp-1-ab", "step_x", "step_3.old", "step_9+", "step_9+3+1"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_12").write_text("a file")
    found = manifest.save_points(tmp_path)
    assert [point.name for point in found] == [
        *("step_10", "step_9+12", "step_9+3", "step_9", "step_2"),
    ]
    assert [(point.step, point.mini_batches) for point in found[:3]] == [(10, 0), (9, 12), (9, 3)]


def test_manifest_of_a_finished_step_need_not_count_mini_batches(whole: Path) -> None:
    value = json.loads((whole / manifest.MANIFEST).read_text())
    del value["mini_batches"]
    (whole / manifest.MANIFEST).write_text(json.dumps(value))
    assert manifest.read_manifest(whole).point == SavePoint(3)


def test_each_file_is_hashed_by_one_rank_and_the_bytes_are_spread() -> None:
    files = [manifest.FileEntry(f"f{i}", size, "") for i, size in enumerate((8, 1, 5, 3, 4, 0, 3))]
    shares = [manifest.share(files, rank, 3) for rank in range(3)]
    assert sorted(f.name for share in shares for f in share) == sorted(f.name for f in files)
    assert [sum(f.size for f in share) for share in shares] == [8, 8, 8]
    assert manifest.share(files[:1], 2, 3) == []
