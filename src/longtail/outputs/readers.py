"""Reads files of saved logits, or of embeddings of a frozen backbone, with their labels.

| file | what it holds |
|---|---|
| .npz | `logits` (N, K), or (N,) for two classes, or `features`, `embeddings` or `X` (N, D); `labels` (N,), or (N, K) for several labels per sample, `class_names` (K,); beside logits also the names of `OPTIONAL` |
| .npy | logits or features; labels in a second file, .npy or one label per line |
| .safetensors | the same names as .npz, or outputs written by `longtail extract` |
| .csv, .tsv | a header; a column of labels, the others are logits in class order, or features |
| .parquet | a column of lists of numbers, the features, and a column of labels |
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longtail.data.parquet import KIND as PARQUET
from longtail.data.parquet import hub_class_names, open_parquet
from longtail.data.tables import DELIMITERS, csv_reader
from longtail.errors import UserError
from longtail.files.reading import read_text, reading, require_file, require_small_archive
from longtail.files.tensors import read
from longtail.outputs.checks import as_counts, as_features, as_label_matrix, as_labels, as_logits
from longtail.outputs.record import KIND, Outputs

SUFFIXES = (".npz", ".npy", ".safetensors", *DELIMITERS)
LABEL_NAMES = ("labels", "label", "y", "target", "targets")
FEATURE_NAMES = ("features", "embeddings", "x", "embedding", "feature")
ROW_NAMES = ("id", "idx", "index", "row")
OPTIONAL = ("head_weight", "head_bias", "features")
Arrays = dict[str, Any]


def read_outputs(
    path: Path,
    labels: Path | None = None,
    *,
    split: str = "train",
    need_counts: bool = False,
    label_column: str | None = None,
) -> Outputs:
    """Outputs from a file of saved logits; `labels` is a second file, `label_column` the name of a column or array.

    Class counts that are not in the file are those of its labels; with `need_counts` that is an error.
    """
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin"):
        raise UserError(f"{path}: weights alone are not enough; use longtail.calibrate(model, loader) in Python")
    arrays = _read(path, SUFFIXES, ("logits",), labels, label_column)
    if "outputs" in arrays:
        return arrays["outputs"]
    _require_labels(path, arrays, split)
    if need_counts and "class_counts" not in arrays:
        raise UserError(
            f"{path} has no class_counts (K,), the training samples per class; add them, or give --train FILE"
        )
    try:
        arrays = _with_two_logits(_with_column_names(arrays))
        logits = np.asarray(as_logits(arrays["logits"]))
        truth = as_labels(arrays["labels"], logits.shape)[0].numpy()
        counts = np.bincount(truth, minlength=logits.shape[1])
        if "class_counts" in arrays:
            counts = as_counts(arrays["class_counts"], logits.shape[1])
    except (UserError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    optional: Arrays = {name: np.asarray(arrays[name]) for name in OPTIONAL if name in arrays}
    names = tuple(map(str, arrays["class_names"])) if "class_names" in arrays else ()
    return Outputs(truth, counts, logits=logits, split=split, class_names=names, **optional)


def read_held_out(path: Path, split: str, train: Outputs, label_column: str | None = None) -> Outputs:
    """Held-out outputs from a file: their split is `split`, and their class counts are those of the training set."""
    outputs = read_outputs(path, split=split, label_column=label_column)
    try:
        return replace(outputs.with_counts_of(train), split=split)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


@dataclass(frozen=True)
class LabelOutputs:
    """Outputs of a model with several labels per sample, from a file.

    Args:
        logits: (N, K), one for each label.
        labels: (N, K) bool.
        names: of the K labels; their numbers if the file has none.
        head_weight: (K, D) of the last layer, if the file has it.
        head_bias: (K,).
    """

    logits: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]
    head_weight: np.ndarray | None = None
    head_bias: np.ndarray | None = None


def read_label_outputs(
    path: Path, labels: Path | None = None, *, split: str = "train", label_column: str | None = None
) -> LabelOutputs:
    """Logits (N, K) and labels (N, K) of 0 and 1 from a file of saved logits."""
    arrays = _read(path, (".npz", ".npy", ".safetensors"), ("logits",), labels, label_column)
    if "outputs" in arrays:
        raise UserError(f"{path} has one class per sample; --method multilabel takes labels (N, K) of 0 and 1")
    _require_labels(path, arrays, split)
    try:
        logits, truth = np.asarray(as_logits(arrays["logits"])), as_label_matrix(arrays["labels"]).numpy()
        if logits.shape != truth.shape:
            raise UserError(f"logits have shape {logits.shape}, but labels {truth.shape}")
        names = tuple(map(str, arrays.get("class_names", range(logits.shape[1]))))
        if len(names) != logits.shape[1]:
            raise UserError(f"{len(names)} class_names for {logits.shape[1]} labels")
        weight, bias = (np.asarray(arrays[name]) if name in arrays else None for name in ("head_weight", "head_bias"))
        if weight is not None and (weight.ndim != 2 or len(weight) != len(names)):
            raise UserError(f"head_weight must have shape ({len(names)}, D), not {weight.shape}")
        if bias is not None and bias.shape != (len(names),):
            raise UserError(f"head_bias must have shape ({len(names)},), not {bias.shape}")
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return LabelOutputs(logits, truth, names, weight, bias)


def _require_labels(path: Path, arrays: Arrays, split: str) -> None:
    if "labels" not in arrays:
        elsewhere = "give them with --labels FILE" if split == "train" else "put logits and labels into one file"
        raise UserError(f"{path} has no labels (a column or array called label, labels, y or target); {elsewhere}")


@dataclass(frozen=True)
class Embeddings:
    """Features of samples from a file."""

    path: Path
    features: np.ndarray  # (N, D), finite floats; memory-mapped if the file allows it
    labels: np.ndarray | None  # (N,) whole numbers or names, if there are any


def read_embeddings(path: Path, labels: Path | None = None, *, label_column: str | None = None) -> Embeddings:
    """Embeddings of a file; `labels` is a second file, `label_column` the name of a column or array."""
    arrays = _read(path, (*SUFFIXES, ".parquet"), FEATURE_NAMES, labels, label_column)
    if "outputs" in arrays:
        outputs: Outputs = arrays["outputs"]
        if outputs.features is None:
            raise UserError(f"{path} has no features, only logits")
        named = {"class_names": outputs.class_names} if outputs.class_names else {}
        arrays = {"features": outputs.features, "labels": outputs.labels, **named}
    try:
        features = as_features(arrays["features"], len(arrays["features"]))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if "labels" not in arrays:
        return Embeddings(path, features, None)
    truth = _class_labels(labels or path, np.asarray(arrays["labels"]))
    if "class_names" in arrays and truth.dtype.kind in "iu":
        names = np.asarray(arrays["class_names"]).astype(str)
        if len(truth) and not 0 <= truth.min() <= truth.max() < len(names):
            raise UserError(f"{path} has labels from {truth.min()} to {truth.max()}, but {len(names)} class names")
        truth = names[truth]
    if len(truth) != len(features):
        raise UserError(f"{path} has {len(features)} rows of features, but {len(truth)} labels; each row needs one")
    return Embeddings(path, features, truth)


def _read(
    path: Path, suffixes: tuple[str, ...], names: tuple[str, ...], labels: Path | None, label_column: str | None
) -> Arrays:
    """The arrays of a file by name: the numbers under `names[0]`, `labels` if there are any.

    A table also has `columns`, the headings of the numbers; a file of outputs is `outputs`.
    """
    require_file(path)
    suffix = path.suffix.lower()
    if suffix not in suffixes:
        raise UserError(f"{path}: cannot read {suffix or 'a file without ending'}; use {', '.join(suffixes)}")
    with reading(path, f"a file of {names[0]} and labels"):
        if suffix in DELIMITERS:
            arrays = _read_table(path, names[0], label_column)
        elif suffix == ".parquet":
            arrays = _read_parquet(path, label_column)
        elif suffix == ".npy":
            arrays = {names[0]: read_npy(path)}
        else:
            arrays, details = (read_npz(path), {}) if suffix == ".npz" else read(path)
            if details.get("kind") == KIND:
                arrays = {"outputs": Outputs.open(path), "labels": None}
            else:
                arrays = _with_usual_names(path, arrays, names, label_column)
    if labels is not None:
        if "labels" in arrays:
            raise UserError(f"{path} has labels of its own; leave out the file of labels {labels}")
        arrays["labels"] = _read_labels(labels)
    return arrays


def _with_usual_names(path: Path, arrays: Arrays, names: tuple[str, ...], label_name: str | None) -> Arrays:
    name = _first_of(names, arrays)
    if name is None:
        wanted = "features, embeddings or X" if names == FEATURE_NAMES else names[0]
        raise UserError(f"{path} has no array called {wanted}; it has: {', '.join(arrays) or 'none'}")
    label = _label_name(path, list(arrays), label_name)
    return {**arrays, names[0]: arrays[name], **({} if label is None else {"labels": arrays[label]})}


def _first_of(usual: tuple[str, ...], given: Any) -> str | None:
    """The first of the usual names that is given, in upper or lower case."""
    return next((name for wanted in usual for name in given if name.lower() == wanted), None)


def _label_name(path: Path, given: list[str], wanted: str | None) -> str | None:
    """The name of the column or array of labels; None if there is none of the usual names."""
    name = _first_of(LABEL_NAMES if wanted is None else (wanted.lower(),), given)
    if name is None and wanted is not None:
        raise UserError(f"{path} has no labels called {wanted}; it has: {', '.join(given[:6])}")
    return name


def _with_column_names(arrays: Arrays) -> Arrays:
    """The headings of the logits of a table as class names; labels may be among them."""
    headings = arrays.get("columns", [])
    if len(set(headings)) < max(len(headings), 2):
        return arrays
    if all(heading.isdecimal() for heading in headings):
        numbers = [int(heading) for heading in headings]
        if numbers != sorted(numbers):
            raise UserError(f"the columns of the logits are not in the order of the classes: {', '.join(headings[:8])}")
        return arrays
    places = {name: number for number, name in enumerate(headings) if not name.isdecimal()}
    labels = np.array([float(places.get(name, name)) for name in arrays["labels"].tolist()])
    return {**arrays, "labels": labels, "class_names": headings}


def _with_two_logits(arrays: Arrays) -> Arrays:
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


def _read_labels(path: Path) -> np.ndarray:
    if path.suffix.lower() == ".npy":
        return read_npy(path)
    return _numbers_or_names([line.strip() for line in read_text(path, "a file of labels").splitlines()])


def _numbers_or_names(cells: list[str]) -> np.ndarray:
    """Labels in a text: whole numbers if all of them are, otherwise names."""
    if cells and all(cell.removeprefix("-").isdecimal() and len(cell) < 18 for cell in cells):
        return np.array([int(cell) for cell in cells])
    return np.array(cells)


def _read_table(path: Path, name: str, label_column: str | None) -> Arrays:
    """The columns of a table as numbers (N, D) called `name`, but one that holds the labels."""
    lines = read_text(path, f"a CSV file of {name}").splitlines(keepends=True)
    reader = csv_reader(lines, path)
    header = [heading.strip() for heading in next(reader, [])]
    if "" in header:
        raise UserError(f"{path} has a column without a name; if it numbers the rows, leave it out (index=False)")
    label = _label_name(path, header, label_column)
    column = None if label is None else header.index(label)
    numbering = [heading for heading in header if heading.lower() in ROW_NAMES and heading != label]
    if numbering and name == FEATURE_NAMES[0]:
        raise UserError(f"{path}: the column {numbering[0]} names rows and is no feature; leave it out")
    headings = [heading for heading in header if heading != label]
    rows, labels = [], []
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise UserError(f"{path}, line {reader.line_num}: {len(cells)} cells where the header has {len(header)}")
        if column is not None:
            labels.append(cells.pop(column).strip())
        numbers: list[float] = []
        try:
            for cell in cells:
                numbers.append(float(cell))
        except ValueError as error:
            hint = "leave it out" if label else "if a column holds the labels, name it with --label-column"
            where = f"{path}, line {reader.line_num}: {error} in column {headings[len(numbers)]}"
            raise UserError(f"{where}; {name} are numbers; {hint}") from error
        rows.append(np.array(numbers))
    if not rows:
        raise UserError(f"{path} holds no samples")
    arrays: Arrays = {name: np.stack(rows), "columns": headings}
    return arrays if column is None else {**arrays, "labels": _numbers_or_names(labels)}


def _read_parquet(path: Path, label_column: str | None) -> Arrays:
    file, _, _ = open_parquet(path)
    with reading(path, PARQUET):
        schema = file.schema_arrow
        list_types = ("list<", "large_list<", "fixed_size_list<")
        lists = [field.name for field in schema if str(field.type).startswith(list_types)]
        name = _first_of(FEATURE_NAMES, lists) or (lists[0] if len(lists) == 1 else None)
        if name is None:
            raise UserError(f"{path} has no column 'features' of lists of numbers; columns: {', '.join(schema.names)}")
        label = _label_name(path, [other for other in schema.names if other != name], label_column)
        table = file.read(columns=[name] if label is None else [name, label])
        arrays: Arrays = {"features": _matrix(path, table.column(name))}
        if label is None:
            return arrays
        cells = table.column(label)
        if cells.null_count:
            raise UserError(f"{path}, row {cells.to_pylist().index(None)}: there is no label")
        if names := hub_class_names(schema, label):
            arrays["class_names"] = names
        return {**arrays, "labels": np.array(cells.to_pylist())}


def _matrix(path: Path, column: Any) -> np.ndarray:
    """Lists of equal length as (N, D)."""
    import pyarrow.compute as pc

    if len(column) == 0:
        raise UserError(f"{path} holds no samples")
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    row = int(np.argmax((lengths != lengths[0]) | (lengths == 0)))
    if lengths[row] != lengths[0] or not lengths[0]:
        raise UserError(f"{path}, row {row}: an embedding of {lengths[row]} numbers, the first has {lengths[0]}")
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return np.concatenate(values).reshape(len(column), -1)


def _class_labels(path: Path, labels: np.ndarray) -> np.ndarray:
    """Labels (N,) as whole numbers or names."""
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.dtype.kind == "f":
        wrong = np.flatnonzero(~np.isfinite(labels) | (labels != np.floor(labels)))
        if len(wrong):
            raise UserError(f"{path}: the label in row {wrong[0]} is {labels[wrong[0]]}, no whole number and no name")
        return labels.astype(np.int64)
    if labels.dtype.kind == "U" and not np.char.str_len(labels).all():
        raise UserError(f"{path}: the label in row {int(np.argmin(np.char.str_len(labels)))} is empty")
    return np.char.decode(labels, "utf-8") if labels.dtype.kind == "S" else labels
