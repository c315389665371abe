"""Reads saved logits and labels from .npz, .npy, .csv and .safetensors files.

| file | what it holds |
|---|---|
| .npz | `logits` (N, K), or (N,) for two classes, and `labels` (N,); optional: the names of `KNOWN` and `class_names` |
| .npy | logits (N, K); labels in a second .npy file |
| .csv | a header; one column of labels (label, labels, y, target), the others are logits in class order |
| .safetensors | the same names as .npz, or outputs written by `longtail extract` |
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from longtail.errors import UserError
from longtail.files.reading import read_text, reading, require_file, require_small_archive
from longtail.files.tensors import read
from longtail.outputs.checks import as_counts, as_labels, as_logits
from longtail.outputs.record import KIND, Outputs

SUFFIXES = (".npz", ".npy", ".csv", ".safetensors")
LABEL_NAMES = ("labels", "label", "y", "target", "targets")
KNOWN = ("class_counts", "head_weight", "head_bias", "features")


def read_outputs(
    path: Path,
    labels: Path | None = None,
    *,
    split: str = "train",
    need_counts: bool = False,
    label_column: str | None = None,
) -> Outputs:
    """Outputs from a file of saved logits; `labels` is a second file, for .npy, `label_column` a column of a .csv.

    Class counts that are not in the file are those of its labels; with `need_counts` that is an error.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin"):
        raise UserError(
            f"{path}: weights alone are not enough; in Python, longtail.calibrate(model, loader) calibrates"
        )
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: cannot read {path.suffix or 'a file without ending'}; use {', '.join(SUFFIXES)}")
    with reading(path, "a file of logits and labels"):
        return _read(path, labels, split, need_counts, label_column)


def _read(path: Path, labels: Path | None, split: str, need_counts: bool, label_column: str | None) -> Outputs:
    details: dict[str, Any] = {}
    if path.suffix == ".safetensors":
        arrays, details = read(path)
    elif path.suffix == ".csv":
        arrays = _read_csv(path, label_column)
    else:
        arrays = read_npz(path) if path.suffix == ".npz" else {"logits": read_npy(path)}
    if labels is not None:
        if any(name in arrays for name in LABEL_NAMES):
            raise UserError(f"{path} has labels of its own; leave out --labels")
        arrays["labels"] = read_npy(labels)
    if details.get("kind") == KIND:
        return Outputs.open(path)
    if need_counts and "class_counts" not in arrays:
        raise UserError(
            f"{path} has no class_counts (K,), the training samples per class; add them, or give the training logits "
            "(--train FILE)"
        )
    return _outputs(path, arrays, split)


def read_held_out(path: Path, split: str, train: Outputs, label_column: str | None = None) -> Outputs:
    """Held-out outputs from a file: their split is `split`, and their class counts are those of the training set."""
    outputs = read_outputs(path, split=split, label_column=label_column)
    if outputs.num_classes != train.num_classes:
        raise UserError(f"{path} has {outputs.num_classes} classes, the training logits have {train.num_classes}")
    return replace(outputs.with_counts_of(train), split=split)


def _outputs(path: Path, arrays: dict[str, np.ndarray], split: str) -> Outputs:
    label_names = [name for name in LABEL_NAMES if name in arrays]
    if "logits" not in arrays:
        raise UserError(f"{path} has no array called logits; it has: {', '.join(arrays) or 'nothing'}")
    if not label_names:
        elsewhere = "give them with --labels FILE.npy" if split == "train" else "put logits and labels into one .npz"
        raise UserError(f"{path} has no labels (an array called labels); {elsewhere}")
    try:
        arrays = _with_two_logits(arrays)
        logits = np.asarray(as_logits(arrays["logits"]))
        truth, _ = as_labels(arrays[label_names[0]], logits.shape)
        counts = as_counts(arrays["class_counts"], logits.shape[1]) if "class_counts" in arrays else None
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    optional = {name: np.asarray(arrays[name]) for name in KNOWN if name in arrays and name != "class_counts"}
    return Outputs(
        labels=truth.numpy(),
        class_counts=np.bincount(truth.numpy(), minlength=logits.shape[1]) if counts is None else counts,
        logits=logits,
        split=split,
        class_names=tuple(map(str, arrays["class_names"])) if "class_names" in arrays else (),
        **optional,  # type: ignore[arg-type]
    )


def _with_two_logits(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One logit z per sample, (N,) or (N, 1), and a head with one row become the two logits (-z / 2, z / 2)."""
    given = np.asarray(arrays["logits"])
    if given.dtype.kind != "f" or given.ndim not in (1, 2) or given.shape[1:] not in ((), (1,)) or given.size < 2:
        return arrays
    if ((given >= 0) & (given <= 1)).all():
        raise UserError("these are probabilities of class 1, not logits; pass log(p / (1 - p))")
    two = {"logits": np.stack([-given.ravel() / 2, given.ravel() / 2], 1)}
    for name in ("head_weight", "head_bias"):
        if name in arrays and len(np.asarray(arrays[name])) == 1:
            row = np.asarray(arrays[name]) / 2
            two[name] = np.concatenate([-row, row])
    return {**arrays, **two}


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name; an archive that unpacks to far more than it has is refused."""
    with reading(path, "a whole .npz file of plain arrays"):
        require_small_archive(path)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


def read_npy(path: Path) -> np.ndarray:
    """The array of a file, memory-mapped."""
    require_file(path)
    with reading(path, "a whole .npy file of a plain array"):
        return np.asanyarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _read_csv(path: Path, label_column: str | None = None) -> dict[str, np.ndarray]:
    """Labels are class indices, or names that are headings of the logits."""
    lines = read_text(path, "a CSV file of logits").splitlines()
    columns = [column.strip().strip('"') for column in lines[0].split(",")] if lines else []
    if "" in columns:
        raise UserError(
            f"{path} has a column without a name; if it numbers the rows, leave it out (pandas: index=False)"
        )
    names = LABEL_NAMES if label_column is None else (label_column.lower(),)
    label_columns = [index for index, column in enumerate(columns) if column.lower() in names]
    if len(label_columns) != 1:
        name = label_column or "label"
        raise UserError(f"{path} needs a header with one column called {name}; its columns: {', '.join(columns[:6])}")
    label = label_columns.pop()
    classes = {name: float(index) for index, name in enumerate(columns[:label] + columns[label + 1 :])}
    rows = []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        cells = line.split(",")
        if len(cells) != len(columns):
            raise UserError(f"{path}, line {number}: {len(cells)} cells where the header has {len(columns)}")
        if (name := cells[label].strip().strip('"')) in classes and not name.isdecimal():
            cells[label] = str(classes[name])
        try:
            rows.append([float(cell) for cell in cells])
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise UserError(f"{path} holds no samples")
    table = np.array(rows)
    return {"labels": table[:, label], "logits": np.delete(table, label, axis=1)}
