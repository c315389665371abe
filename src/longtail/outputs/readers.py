"""Reads saved logits and labels from .npz, .npy, .csv and .safetensors files.

| file | what it holds |
|---|---|
| .npz | `logits` (N, K) and `labels` (N,); optional: the names of `KNOWN` and `class_names` |
| .npy | logits (N, K); labels in a second .npy file |
| .csv | a header; one column called label (or labels, y, target), the others are logits in class order |
| .safetensors | the same names as .npz, or outputs written by `longtail extract` |
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from longtail.core.mapped import read
from longtail.core.reading import read_text, reading, require_file, require_small_archive
from longtail.errors import UserError
from longtail.outputs.checks import as_counts, as_labels, as_logits
from longtail.outputs.record import KIND, Outputs

SUFFIXES = (".npz", ".npy", ".csv", ".safetensors")
LABEL_NAMES = ("labels", "label", "y", "target", "targets")
KNOWN = ("class_counts", "head_weight", "head_bias", "features")


def read_outputs(path: Path, labels: Path | None = None, *, split: str = "train", need_counts: bool = False) -> Outputs:
    """Outputs from a file of saved logits; `labels` is a second file, for .npy.

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
        return _read(path, labels, split, need_counts)


def _read(path: Path, labels: Path | None, split: str, need_counts: bool) -> Outputs:
    details: dict[str, Any] = {}
    if path.suffix == ".safetensors":
        arrays, details = read(path)
    else:
        arrays = {".npz": _read_npz, ".npy": _read_npy, ".csv": _read_csv}[path.suffix](path)
    if labels is not None:
        if any(name in arrays for name in LABEL_NAMES):
            raise UserError(f"{path} has labels of its own; leave out --labels")
        arrays["labels"] = _read_npy(labels)["logits"]
    if details.get("kind") == KIND:
        return Outputs.open(path)
    if need_counts and "class_counts" not in arrays:
        raise UserError(
            f"{path} has no class_counts (K,), the training samples per class; add them, or give the training logits "
            "(--train FILE)"
        )
    return _outputs(path, arrays, split)


def read_held_out(path: Path, split: str, train: Outputs) -> Outputs:
    """Held-out outputs from a file: their split is `split`, and their class counts are those of the training set."""
    outputs = read_outputs(path, split=split)
    if outputs.num_classes != train.num_classes:
        raise UserError(f"{path} has {outputs.num_classes} classes, the training logits have {train.num_classes}")
    return replace(outputs.with_counts_of(train), split=split)


def _outputs(path: Path, arrays: dict[str, np.ndarray], split: str) -> Outputs:
    found = [name for name in LABEL_NAMES if name in arrays]
    if "logits" not in arrays:
        raise UserError(f"{path} has no array called logits; it has: {', '.join(arrays) or 'nothing'}")
    if not found:
        elsewhere = "give them with --labels FILE.npy" if split == "train" else "put logits and labels into one .npz"
        raise UserError(f"{path} has no labels (an array called labels); {elsewhere}")
    try:
        logits = np.asarray(as_logits(arrays["logits"]))
        truth, _ = as_labels(arrays[found[0]], logits.shape)
        counts = as_counts(arrays["class_counts"], logits.shape[1]) if "class_counts" in arrays else None
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    own = np.bincount(truth.numpy(), minlength=logits.shape[1])
    known = {name: np.asarray(arrays[name]) for name in KNOWN if name in arrays and name != "class_counts"}
    return Outputs(
        labels=truth.numpy(),
        class_counts=own if counts is None else counts,
        logits=logits,
        split=split,
        class_names=tuple(map(str, arrays["class_names"])) if "class_names" in arrays else (),
        **known,  # type: ignore[arg-type]
    )


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with reading(path, "a whole .npz file of plain arrays"):
        require_small_archive(path)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


def _read_npy(path: Path) -> dict[str, np.ndarray]:
    require_file(path)
    with reading(path, "a whole .npy file of a plain array"):
        return {"logits": np.load(path, mmap_mode="r", allow_pickle=False)}


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    lines = read_text(path, "a CSV file of logits").splitlines()
    columns = [column.strip().strip('"').lower() for column in lines[0].split(",")] if lines else []
    if "" in columns:
        raise UserError(
            f"{path} has a column without a name; if it numbers the rows, leave it out (pandas: index=False)"
        )
    places = [place for place, column in enumerate(columns) if column in LABEL_NAMES]
    if len(places) != 1:
        raise UserError(f"{path} needs a header with one column called label; its columns: {', '.join(columns[:6])}")
    rows = []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        try:
            rows.append([float(cell) for cell in line.split(",")])
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from error
        if len(rows[-1]) != len(columns):
            raise UserError(f"{path}, line {number}: {len(rows[-1])} cells where the header has {len(columns)}")
    if not rows:
        raise UserError(f"{path} holds no samples")
    table = np.array(rows)
    return {"labels": table[:, places[0]], "logits": np.delete(table, places[0], axis=1)}
