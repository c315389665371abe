"""Reads embeddings of a frozen backbone, with or without labels.

| file | what it holds |
|---|---|
| .npz | an array called features, embeddings or X, (N, D), and labels (N,): numbers or names |
| .npy | features (N, D); labels in a second file, .npy or one label per line |
| .safetensors | the same names as .npz, or outputs written by `longtail extract` |
| .parquet | a column of lists of numbers, and a column of labels |
| .csv, .tsv | a header; a column of labels, the others are features |

`class_names` (K,) in a file turn labels that are class indices into names.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longtail.data.parquet import KIND as PARQUET
from longtail.data.parquet import hub_class_names, pyarrow_parquet, require_plausible
from longtail.data.tables import DELIMITERS, delimiter_of
from longtail.errors import UserError
from longtail.files.reading import read_text, reading, require_file
from longtail.files.tensors import read
from longtail.outputs.readers import LABEL_NAMES, read_npy, read_npz
from longtail.outputs.record import KIND, Outputs

SUFFIXES = (".npz", ".npy", ".safetensors", ".parquet", *DELIMITERS)
FEATURE_NAMES = ("features", "embeddings", "x", "embedding", "feature")
CHECKED_NUMBERS = 1 << 22  # features that are checked at a time


@dataclass(frozen=True)
class Embeddings:
    """Features of samples from a file.

    Args:
        path: of the file.
        features: (N, D), finite floats; memory-mapped if the file allows it.
        labels: (N,) whole numbers or names, if there are any.
    """

    path: Path
    features: np.ndarray
    labels: np.ndarray | None


def read_embeddings(path: Path, labels: Path | None = None, *, label_column: str | None = None) -> Embeddings:
    """Embeddings of a file; `labels` is a second file, `label_column` a column or an array of another name."""
    require_file(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: cannot read {suffix or 'a file without ending'}; use {', '.join(SUFFIXES)}")
    with reading(path, "a file of embeddings"):
        if suffix in DELIMITERS:
            features, found = _read_table(path, label_column)
        elif suffix == ".parquet":
            features, found = _read_parquet(path, label_column)
        else:
            features, found = _read_arrays(path, suffix, label_column)
    if labels is not None:
        if found is not None:
            raise UserError(f"{path} has labels of its own; leave out the file of labels {labels}")
        found = _read_labels(labels)
    features = _checked_features(path, features)
    if found is None:
        return Embeddings(path, features, None)
    found = _checked_labels(labels or path, np.asarray(found))
    if len(found) != len(features):
        raise UserError(f"{path} has {len(features)} rows of features, but {len(found)} labels; each row needs one")
    return Embeddings(path, features, found)


def _read_arrays(path: Path, suffix: str, label_name: str | None) -> tuple[np.ndarray, np.ndarray | None]:
    if suffix == ".npy":
        return read_npy(path), None
    arrays, details = read(path) if suffix == ".safetensors" else (read_npz(path), {})
    if details.get("kind") == KIND:
        outputs = Outputs.open(path)
        arrays = {name: value for name, value in arrays.items() if name in ("features", "labels")}
        if outputs.class_names:
            arrays["class_names"] = np.array(outputs.class_names)
    features = _named(list(arrays), FEATURE_NAMES)
    if features is None:
        raise UserError(f"{path} has no array called features, embeddings or X; it has: {', '.join(arrays) or 'none'}")
    label = _label_name(path, list(arrays), label_name)
    if label is None:
        return arrays[features], None
    return arrays[features], _with_names(path, arrays[label], arrays.get("class_names"))


def _named(given: list[str], usual: tuple[str, ...]) -> str | None:
    """The first of the usual names that is there, in upper or lower case."""
    return next((name for wanted in usual for name in given if name.lower() == wanted), None)


def _label_name(path: Path, given: list[str], wanted: str | None) -> str | None:
    name = _named(given, LABEL_NAMES if wanted is None else (wanted.lower(),))
    if name is None and wanted is not None:
        raise UserError(f"{path} has no labels called {wanted}; it has: {', '.join(given[:6])}")
    return name


def _with_names(path: Path, labels: np.ndarray, class_names: Any) -> np.ndarray:
    if class_names is None or labels.dtype.kind not in "iu":
        return labels
    names = np.asarray(class_names).astype(str)
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(names):
        raise UserError(f"{path} has labels from {labels.min()} to {labels.max()}, but {len(names)} class names")
    return names[labels]


def _read_labels(path: Path) -> np.ndarray:
    if path.suffix.lower() == ".npy":
        return read_npy(path)
    return _numbers_or_names([line.strip() for line in read_text(path, "a file of labels").splitlines()])


def _numbers_or_names(cells: list[str]) -> np.ndarray:
    """Labels in a text: whole numbers if all of them are, otherwise names."""
    if cells and all(cell.removeprefix("-").isdecimal() and len(cell) < 18 for cell in cells):
        return np.array([int(cell) for cell in cells])
    return np.array(cells)


def _read_table(path: Path, label_column: str | None) -> tuple[np.ndarray, np.ndarray | None]:
    lines = read_text(path, "a table of embeddings").splitlines(keepends=True)
    reader = csv.reader(lines, delimiter=delimiter_of(lines, DELIMITERS[path.suffix.lower()]))
    header = [name.strip() for name in next(reader, [])]
    if "" in header:
        raise UserError(f"{path} has a column without a name; if it numbers the rows, leave it out")
    label = _label_name(path, header, label_column)
    column = None if label is None else header.index(label)
    rows, labels = [], []
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise UserError(f"{path}, line {reader.line_num}: {len(cells)} cells where the header has {len(header)}")
        if column is not None:
            labels.append(cells.pop(column).strip())
        try:
            rows.append(np.array([float(cell) for cell in cells]))
        except ValueError as error:
            hint = "" if label else "; if a column holds the labels, name it with --label-column"
            raise UserError(f"{path}, line {reader.line_num}: {error}; features are numbers{hint}") from error
    if not rows:
        raise UserError(f"{path} holds no samples")
    return np.stack(rows), None if column is None else _numbers_or_names(labels)


def _read_parquet(path: Path, label_column: str | None) -> tuple[np.ndarray, np.ndarray | None]:
    parquet = pyarrow_parquet()
    from pyarrow import types

    with reading(path, PARQUET):
        file = parquet.ParquetFile(path)
        require_plausible(file.metadata, path)
        schema = file.schema_arrow
        lists = [
            field.name
            for field in schema
            if types.is_list(field.type) or types.is_large_list(field.type) or types.is_fixed_size_list(field.type)
        ]
        name = _named(lists, FEATURE_NAMES) or (lists[0] if len(lists) == 1 else None)
        if name is None:
            raise UserError(f"{path} has no column 'features' of lists of numbers; columns: {', '.join(schema.names)}")
        label = _label_name(path, [other for other in schema.names if other != name], label_column)
        table = file.read(columns=[name] if label is None else [name, label])
        features = _matrix(path, table.column(name))
        if label is None:
            return features, None
        cells = table.column(label)
        if cells.null_count:
            raise UserError(f"{path}, row {cells.to_pylist().index(None)}: there is no label")
        return features, _with_names(path, np.array(cells.to_pylist()), hub_class_names(schema, label))


def _matrix(path: Path, column: Any) -> np.ndarray:
    """Lists of equal length as (N, D)."""
    import pyarrow.compute as pc

    if len(column) == 0:
        raise UserError(f"{path} holds no samples")
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    wrong = np.flatnonzero(lengths != lengths[0])
    if len(wrong) or lengths[0] == 0:
        row = int(wrong[0]) if len(wrong) else 0
        raise UserError(f"{path}, row {row}: an embedding of {lengths[row]} numbers, the first has {lengths[0]}")
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return np.concatenate(values).reshape(len(column), -1)


def _checked_features(path: Path, features: np.ndarray) -> np.ndarray:
    if features.ndim != 2 or 0 in features.shape:
        raise UserError(
            f"{path}: features must be a table of samples and numbers (N, D), not of shape {features.shape}"
        )
    if features.dtype.kind not in "fiu":
        raise UserError(f"{path}: features must be numbers, not {features.dtype}")
    step = max(CHECKED_NUMBERS // features.shape[1], 1)
    for start in range(0, len(features), step):
        finite = np.isfinite(features[start : start + step]).all(1)
        if not finite.all():
            row = start + int(np.argmin(finite))
            kind = "NaN" if np.isnan(features[row]).any() else "infinity"
            raise UserError(f"{path}: {kind} in row {row}; leave the row out, or compute its embedding again")
    return features


def _checked_labels(path: Path, labels: np.ndarray) -> np.ndarray:
    """Labels (N,) as whole numbers or names."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise UserError(f"{path}: labels must be a list (N,), not of shape {labels.shape}")
    if labels.dtype.kind == "f":
        wrong = np.flatnonzero(labels != np.floor(labels))  # NaN too
        wrong = wrong if len(wrong) else np.flatnonzero(np.isinf(labels))
        if len(wrong):
            raise UserError(f"{path}: the label in row {wrong[0]} is {labels[wrong[0]]}, no whole number and no name")
        return labels.astype(np.int64)
    if labels.dtype.kind in "iub":
        return labels.astype(np.int64)
    if labels.dtype.kind == "S":
        return np.char.decode(labels, "utf-8")
    if labels.dtype.kind != "U":
        raise UserError(f"{path}: labels must be whole numbers or names, not {labels.dtype}")
    if not np.char.str_len(labels).all():
        raise UserError(f"{path}: the label in row {int(np.argmin(np.char.str_len(labels)))} is empty")
    return labels
