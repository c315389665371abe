"""Checks of arrays from users: invalid input raises an error instead of giving a wrong result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtail.distributed import SINGLE_PROCESS, World
from longtail.errors import UserError
from longtail.files.tensors import as_array
from longtail.outputs.rows import LogitRows

Array = np.ndarray | Tensor
MOST_COUNT = 1e12  # samples of one class, or times those of the smallest


def as_logits(logits: Any) -> np.ndarray:
    """A 2-d array of finite numbers that can be logits; an error names the first bad row."""
    if hasattr(logits, "toarray"):
        raise UserError("logits are a sparse matrix; pass a dense array")
    array = as_array(logits)
    if array.dtype.kind == "O":
        array = _from_objects(array, "logits")
    if array.dtype.kind == "c":
        raise UserError("Complex data not supported: logits must be real numbers")
    if array.dtype.kind not in "fiub":
        raise UserError(f"logits must be numbers, not {array.dtype}")
    if array.ndim != 2:
        hint = ". Reshape your data: X.reshape(1, -1) makes one sample of it" if array.ndim == 1 else ""
        raise UserError(f"logits must have shape (samples, classes), not {tuple(array.shape)}{hint}")
    if array.dtype.byteorder not in "=|" or array.dtype == np.longdouble:
        array = array.astype(np.float64)
    check_rows(LogitRows(array))
    return array


def require_same_classes(train: Sequence[str], held_out: Sequence[str]) -> None:
    """Raise if held-out samples have other classes (K names) than training samples, or in another order.

    Names that are the numbers of the columns are no names: such samples fit any others with as many classes.
    """
    if len(held_out) != len(train):
        raise UserError(f"{len(held_out)} classes, where the training samples have {len(train)}")
    known = [tuple(names) for names in (train, held_out) if list(names) != [str(label) for label in range(len(names))]]
    if len(set(known)) < 2:
        return
    label = next(label for label, names in enumerate(zip(*known, strict=True)) if len(set(names)) > 1)
    same = "the same classes in another order" if set(train) == set(held_out) else "other classes"
    raise UserError(
        f"{same} than the training samples: column {label} is {held_out[label]}, and {train[label]} in training; "
        "columns and class names must agree"
    )


def as_features(features: Any, size: int) -> np.ndarray:
    """Features (N, D), finite, one row per sample."""
    array = as_array(features)
    if array.dtype.kind not in "fiub":
        array = _from_objects(array, "features")
    if array.ndim != 2 or len(array) != size:
        raise UserError(f"features must have shape ({size}, D), not {tuple(array.shape)}")
    for where, chunk in LogitRows(array).chunks():
        if (row := _broken_row(where, chunk)) is not None:
            raise UserError(f"features of row {row} contain NaN or inf")
    return array


def _from_objects(array: np.ndarray, name: str) -> np.ndarray:
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} must be numbers: {error} (argument must be a string or a number)") from error


def check_rows(rows: LogitRows, world: World = SINGLE_PROCESS) -> None:
    """At least two classes, at least one sample, finite, and not probabilities; each process looks at its share."""
    size, classes = rows.shape
    if size == 0:
        raise UserError("there are no samples: 0 sample(s) (shape=(0, …)) while a minimum of 1 is required.")
    if classes == 0:
        raise UserError(f"0 feature(s) (shape=({size}, 0)) while a minimum of 1 is required.")
    if classes == 1:
        raise UserError(
            f"one class only: logits of shape ({size}, 1), at least two classes are needed; 1 feature(s). For one "
            "logit z per sample pass np.stack([-z / 2, z / 2], 1)"
        )
    computed = rows.weight is not None or rows.bias is not None
    broken, probabilities = None, True
    if computed:  # the logits of a linear head are finite if its inputs are; a few rows show that they are logits
        probabilities = _are_probabilities(rows.read(slice(rows.chunk_rows)))
        rows = rows.stored
    for where, chunk in rows.chunks(*world.share(size)):
        if (broken := _broken_row(where, chunk)) is not None:
            break
        probabilities = probabilities and (computed or _are_probabilities(chunk))
    results = world.gather((broken, probabilities))  # all processes stop, or none
    for row, _ in results:
        if row is not None:
            name = "features" if computed else "logits"
            raise UserError(f"{name} of row {row} contain NaN or inf; drop that sample or correct the model")
    if size > 1 and all(are_probabilities for _, are_probabilities in results):  # one row may sum to 1 by chance
        raise UserError("these are probabilities (every row sums to 1), not logits; pass logits, or log(probabilities)")


def _broken_row(where: slice, chunk: Tensor) -> int | None:
    """The first of these rows that contains NaN or inf."""
    if bool(torch.isfinite(chunk.sum(1)).all()):
        return None
    broken = (~torch.isfinite(chunk)).any(1).nonzero()  # no such row if only the sum overflowed
    return where.start + int(broken[0]) if len(broken) else None


def _are_probabilities(chunk: Tensor) -> bool:
    """Whether every row sums to 1, up to rounding: to two digits in a text file, or to bfloat16."""
    return bool(((chunk.sum(1) - 1).abs() < 0.02).all() and (chunk >= 0).all())


def as_labels(y: Any, shape: tuple[int, ...], class_names: np.ndarray | None = None) -> tuple[Tensor, np.ndarray]:
    """Labels 0..K-1 (N,) int64, and the user's names of the classes (K,): `class_names`, if given."""
    size, classes = shape
    if y is None:
        raise UserError("requires y to be passed, but the target y is None")
    values = as_array(y)
    if values.shape == (size, 1):
        from sklearn.utils.validation import column_or_1d  # late: training works without scikit-learn

        values = column_or_1d(values, warn=True)
    if values.ndim != 1:
        several = "; for several labels per sample use MultiLabelCalibration (longtail calibrate --method multilabel)"
        hint = several if values.shape == (size, classes) else ""
        raise UserError(f"labels must have shape ({size},), not {values.shape}{hint}")
    if len(values) != size:
        raise UserError(f"inconsistent numbers of samples: {size} rows of logits and {len(values)} labels")
    if values.dtype.kind in "iubf":
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise UserError("labels contain NaN or infinity")
        if values.dtype.kind == "f" and (values != np.round(values)).any():
            raise UserError("Unknown label type: continuous. Labels must be classes, not real numbers")
        numbers = np.require(values, np.int64, ("C", "W"))  # a copy only if one is needed
        if numbers.min() < 0 or numbers.max() >= classes:
            raise UserError(
                f"labels must be 0..{classes - 1}, the column of each class in the logits; "
                f"found {numbers.min()}..{numbers.max()}"
            )
        return torch.from_numpy(numbers), np.arange(classes)
    if class_names is not None:
        unknown = sorted(set(values.tolist()) - set(class_names.tolist()))
        if unknown:
            raise UserError(
                f"{unknown[0]!r} is not among the classes of the fit: {', '.join(map(str, class_names[:8]))}"
            )
        return torch.from_numpy(np.searchsorted(class_names, values)), class_names
    names, codes = np.unique(values, return_inverse=True)
    if len(names) != classes:
        raise UserError(
            f"the logits have {classes} columns but y names {len(names)} classes; "
            "names need one column each, in alphabetical order"
        )
    if all(str(name).isdecimal() for name in names) and (np.diff([int(name) for name in names]) < 0).any():
        raise UserError(
            f"y holds numbers written as text, whose alphabetical order ({', '.join(map(str, names[:4]))}, …) is not "
            "that of the columns; pass them as numbers"
        )
    return torch.from_numpy(codes.astype(np.int64)), names


def as_label_matrix(y: Any) -> Tensor:
    """Labels (N, K) of a multi-label set, one column of 0 and 1 per label, as bool."""
    if y is None or hasattr(y, "toarray"):
        what = "requires y to be passed, but the target y is None" if y is None else "labels are a sparse matrix"
        raise UserError(f"{what}; pass a dense array (N, K) of 0 and 1")
    try:
        values = as_array(y)
    except ValueError as error:  # NumPy's, about rows of different lengths
        raise UserError("labels must have one column per label: every sample needs K entries of 0 and 1") from error
    if values.ndim != 2 or values.dtype.kind not in "iubf":
        raise UserError(
            f"multi-label targets must have shape (samples, labels) and entries 0 and 1, not {values.dtype} of shape "
            f"{values.shape}"
        )
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise UserError(
            f"label {column} of row {row} is {values[row, column]:g}, not 0 or 1; leave out samples whose labels are "
            "not known"
        )
    return torch.from_numpy(values.astype(bool))


def as_counts(class_counts: Any, classes: int) -> np.ndarray:
    """Training samples per class, all positive."""
    counts = vector(class_counts, classes, "class_counts")
    if (counts < 0).any():
        raise UserError(f"class_counts[{int(np.argmin(counts))}] is negative")
    require_possible_counts(counts, "class_counts")
    return counts


def require_possible_counts(counts: np.ndarray, name: str) -> None:
    """Refuse counts that no data set has: in sums and ratios of such numbers the smaller classes vanish."""
    positive = counts[counts > 0].astype(np.float64)
    if len(positive) and positive.max() > MOST_COUNT * min(positive.min(), 1):
        raise UserError(
            f"{name} go from {positive.min():g} to {positive.max():g}; no data set has such numbers of samples"
        )


def as_norms(weight_norms: Any, classes: int) -> np.ndarray:
    """Norms of the head's class vectors, all positive."""
    norms = vector(weight_norms, classes, "weight_norms")
    if (norms <= 0).any():
        raise UserError(f"weight_norms[{int(np.argmin(norms))}] is {norms.min():g}; a class vector must not be zero")
    return norms


def vector(values: Any, classes: int, name: str) -> np.ndarray:
    array = as_array(values)
    if array.shape != (classes,):
        raise UserError(f"{name} must have one number per class: shape ({classes},), not {array.shape}")
    array = array.astype(np.float64) if array.dtype.kind in "fiub" else _from_objects(array, name)
    if not np.isfinite(array).all():
        raise UserError(f"{name}[{int(np.argmin(np.isfinite(array)))}] is not finite")
    return array


def require_every_class(
    counts: np.ndarray, where: str = "class_counts", names: Sequence[str] | np.ndarray = ()
) -> None:
    """Every class must have a sample; classes without names are numbers."""
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        where += f", {counts.sum():g} sample(s)" if counts.sum() < len(counts) else ""
        more = f" (and {len(empty) - 1} more classes)" if len(empty) > 1 else ""
        raise UserError(
            f"class {names[empty[0]] if len(names) else empty[0]} has no sample in {where}{more}; "
            "calibration needs at least one per class: leave the class out or find samples of it"
        )


def refuse_beside_outputs(**given: Any) -> None:
    """Refuse arguments beside `Outputs`, which already contain them: they would contradict or be ignored."""
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise UserError(f"Outputs hold their own {', '.join(named)}; dataclasses.replace(outputs, …) changes them")
