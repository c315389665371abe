"""Trained networks that come with the repository: `released:NAME` stands wherever a run is taken.

RELEASED/NAME/   a run folder: model.safetensors, run.json without paths of a machine, README.md (its card)

RELEASED is the folder `released` of a clone of the repository, or the folder that LONGTAIL_RELEASED names. The
installed package has none.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from longtail.errors import UserError, choose
from longtail.files.atomic import replacing_folder

PREFIX = "released:"
FOLDER = "LONGTAIL_RELEASED"
FILES = ("run.json", "model.safetensors", "README.md")
CLONE = Path(__file__).resolve().parents[3] / "released"


def released_folder() -> Path:
    """Where released networks are; an error says how to get them."""
    given = os.environ.get(FOLDER)
    folder = Path(given) if given else CLONE
    if not folder.is_dir():
        where = f"{FOLDER} names {folder}, which is no folder" if given else f"{folder} does not exist"
        raise UserError(
            f"there are no released networks here: {where}; they are in the folder released of the repository, not in "
            f"the installed package: clone it, or set {FOLDER} to a copy of that folder"
        )
    return folder


def released_names() -> list[str]:
    """The released networks, sorted by name."""
    return sorted(path.parent.name for path in released_folder().glob(f"*/{FILES[0]}"))


def is_released(name: Path | str) -> bool:
    return str(name).startswith(PREFIX)


def find_released(name: Path | str) -> Path:
    """The folder of a released network, `released:NAME`."""
    wanted, names = str(name).removeprefix(PREFIX), released_names()
    if not names:
        raise UserError(f"{released_folder()} holds no released network")
    return released_folder() / choose("released network", wanted, names)


def working_copy(name: str) -> Path:
    """A released network copied to runs/NAME, where commands may write beside it."""
    source = find_released(name)
    return copy_released(source, Path("runs") / source.name)


def copy_released(source: Path, target: Path) -> Path:
    """Copy the folder of a released network; an existing copy is used, any other folder is an error."""
    if _same(source, target):
        return target
    if target.exists():
        raise UserError(f"{target} exists already and is not {PREFIX}{source.name}; move it, or work in another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(target, FILES, "a released network") as folder:
        for file in FILES:
            shutil.copyfile(source / file, folder / file)
    return target


def _same(source: Path, target: Path) -> bool:
    return all(
        (target / file).is_file() and (target / file).read_bytes() == (source / file).read_bytes() for file in FILES[:2]
    )
