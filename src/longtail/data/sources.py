"""Which data set a word on the command line names: a recipe, a folder, or a file that lists or holds images."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from longtail.config import DataConfig
from longtail.errors import UserError
from longtail.recipes import RECIPES


def find_data(name: str, root: str | None = None) -> DataConfig:
    """The configuration of a data set given by the name of a recipe or by a path; nothing is held out of a path."""
    if name in RECIPES:
        return replace(RECIPES[name], root=root)
    path = Path(name).expanduser()
    if path.is_dir():
        return DataConfig(data=_kind_of_folder(path), root=str(path), validation=0)
    if path.is_file():
        kind = "parquet" if path.suffix == ".parquet" else "lists"
        return DataConfig(data=kind, root=root or str(path.parent), train_list=str(path), validation=0)
    close = get_close_matches(name, RECIPES, n=1, cutoff=0.7)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(f"{name!r} is no file, no folder and no recipe{hint}; recipes: {', '.join(RECIPES)}")


def _kind_of_folder(folder: Path) -> str:
    if any(folder.glob("*.parquet")) or any((folder / "data").glob("*.parquet")):
        return "parquet"
    return "csv" if (folder / "train.csv").is_file() else "folder"
