"""What a killed extraction leaves is gone with the next one."""

from pathlib import Path

import torch

from longtail.core.files import replacing
from longtail.distributed.world import World
from longtail.outputs.writer import part_path, remove_parts


def leave_half(path: Path) -> Path:
    """A temporary file as a writer of `path` that is killed leaves it."""
    with replacing(path) as temporary:
        temporary.write_bytes(b"")
    path.unlink()
    temporary.write_bytes(b"half")
    return temporary


def test_parts_of_any_process_and_their_temporary_files_are_removed(tmp_path):
    path, other = tmp_path / "train[1].safetensors", tmp_path / "train.safetensors"
    parts = [part_path(path, rank) for rank in (0, 5)]
    left = [leave_half(path), *map(leave_half, parts)]
    for part in parts:
        part.write_bytes(b"whole")
    kept = leave_half(part_path(other, 0))
    remove_parts(path, World(1, 2, torch.device("cpu")))
    assert all(file.exists() for file in (*left, *parts))
    remove_parts(path, World(0, 2, torch.device("cpu")))
    assert list(tmp_path.iterdir()) == [kept]
