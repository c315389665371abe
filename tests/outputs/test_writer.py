"""What a killed extraction leaves is gone with the next one."""

from pathlib import Path

import torch

from longtail.core.files import replacing
from longtail.core.locks import locked
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


def test_parts_beside_a_whole_file_are_removed_when_it_is_used(digits_copy):
    """Processes that are killed when the rows are joined leave theirs; nobody would write that file again."""
    from longtail.extraction.run import Extractor
    from longtail.runs.folder import Run

    extractor = Extractor(Run.open(digits_copy))
    extractor.outputs("validation")
    path = extractor.path("validation")
    left = part_path(path, 1)
    left.write_bytes(path.read_bytes())
    with locked(path):  # somebody writes there now
        extractor.outputs("validation")
        assert left.exists()
    extractor.outputs("validation")
    assert not left.exists()
