"""What a killed extraction leaves is gone with the next one."""

from pathlib import Path

import pytest
import torch
from torch import nn

import longtail
from longtail.files.atomic import locked, replacing
from longtail.outputs.rows import remove_shards, shards_folder
from longtail.runs.folder import Run
from longtail.runs.network import outputs_path


def leave_half(path: Path) -> Path:
    """A temporary folder as a writer of `path` that is killed leaves it."""
    with replacing(path) as temporary:
        temporary.write_bytes(b"")
    path.unlink()
    temporary.parent.mkdir(parents=True)
    temporary.write_bytes(b"half")
    return temporary.parent


def leave_shard(path: Path, rank: int) -> Path:
    folder = shards_folder(path) / str(rank)
    folder.mkdir(parents=True)
    (folder / "logits").write_bytes(b"rows")
    return folder


def test_shards_of_any_process_and_temporary_files_are_removed(tmp_path):
    path, other = tmp_path / "train[1].safetensors", tmp_path / "train.safetensors"
    leave_half(path)
    leave_shard(path, 0)
    leave_shard(path, 5)
    kept = leave_shard(other, 0)
    remove_shards(path)
    assert list(tmp_path.iterdir()) == [kept.parent]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_new_extraction_to_the_same_file_removes_them(rank, tmp_path):
    path = tmp_path / "outputs.safetensors"
    leave_shard(path, rank)
    longtail.extract(nn.Linear(3, 2), [(torch.eye(3), torch.tensor([0, 1, 0]))], path, device="cpu")
    assert list(tmp_path.iterdir()) == [path]


def test_shards_beside_a_complete_file_are_removed_when_it_is_used(digits_copy):
    """Processes that are killed when the rows are joined leave theirs; nobody would write that file again."""
    run = Run.open(digits_copy)
    run.outputs("validation")
    path = outputs_path(run, "validation")
    left = leave_shard(path, 1)
    with locked(path):  # another process writes there now
        run.outputs("validation")
        assert left.exists()
    run.outputs("validation")
    assert not left.exists()
