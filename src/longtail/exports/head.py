"""The last layer as plain numbers with its formula, for other frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from longtail.errors import UserError, number
from longtail.files.atomic import replacing, write_json
from longtail.heads.kinds import saved_head
from longtail.posthoc.priors import NEVER
from longtail.runs.folder import CALIBRATION_FILE, RUN_FILE, Run
from longtail.tasks.calibration import read_calibration

SOFTMAX = "probabilities = exp(logits) / sum(exp(logits))"
SIGMOIDS = "logits = -log(1 + exp(-logits))"
CHOICE = "predicted = class_names[argmax(logits)]"
LINEAR = "logits = features @ weight.T + bias"
AFFINE = "logits = scale * old_logits + shift"
# The formula of each class of head.
FORMULAS = {
    "Linear": (LINEAR,),
    "SigmoidHead": (LINEAR, SIGMOIDS),
    "DisAlignHead": (
        "old_logits = features @ weight.T + bias",
        "confidence = 1 / (1 + exp(-(features @ confidence_weight + confidence_bias)))",
        "logits = old_logits + confidence * ((scale - 1) * old_logits + shift)",
    ),
}


def write_npz_head(source: Path, out: Path) -> tuple[None, str]:
    """The numbers as a .npz file that opens without pickle."""
    arrays, texts = read_head(source)
    as_arrays = {name: np.array(value) for name, value in texts.items()}
    with replacing(out) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays, **as_arrays)  # type: ignore[arg-type]
    return None, "; ".join(texts["formula"])


def write_json_head(source: Path, out: Path) -> tuple[None, str]:
    """The same as a JSON file."""
    arrays, texts = read_head(source)
    write_json(out, {**texts, **{name: array.tolist() for name, array in arrays.items()}})
    return None, "; ".join(texts["formula"])


def read_head(source: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and texts that describe the last layer of a run, or a calibration of saved logits."""
    if (source / CALIBRATION_FILE).is_file() and not (source / RUN_FILE).is_file():
        return _of_saved_logits(source)
    run = Run.open(source)
    numbers = read_calibration(source, model=run.model_identity)[1] if run.calibration else {}
    head = saved_head(run.model())
    arrays, formula = _layer(head)
    affine = {}
    if isinstance(head, nn.Linear):
        affine = _affine(numbers, source / CALIBRATION_FILE, len(run.class_names))
    texts: dict[str, Any] = {
        "formula": (*formula, SOFTMAX, CHOICE),
        "features": f"input of the last layer, (N, {arrays['weight'].shape[1]})",
        "class_names": run.class_names,
        "method": run.calibration.method if run.calibration else run.config.method,
        "model": run.model_identity,
    }
    if affine:
        texts["formula_on_old_logits"] = (AFFINE, SOFTMAX, CHOICE)
    return {**arrays, **affine, "class_counts": run.class_counts}, texts


def _layer(head: nn.Module) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The arrays of the last layer, and its formula."""
    linear = head if isinstance(head, nn.Linear) else head.get_submodule("classifier")
    assert isinstance(linear, nn.Linear)
    weight = linear.weight.detach().numpy()
    bias = np.zeros(len(weight), np.float32) if linear.bias is None else linear.bias.detach().numpy()
    around = {name: value.detach().numpy() for name, value in head.named_parameters(recurse=False)}
    return {"weight": weight, "bias": bias, **({} if head is linear else around)}, FORMULAS[type(head).__name__]


def _affine(numbers: dict[str, Any], path: Path, classes: int | None = None) -> dict[str, np.ndarray]:
    """Scale and shift per class for the logits of the model before calibration, if the method has them."""
    if not {"scale_", "shift_"} <= set(numbers):
        return {}
    return {name: _vector(numbers[f"{name}_"], classes, f"{name}_ in {path}") for name in ("scale", "shift")}


def _vector(values: Any, classes: int | None, name: str) -> np.ndarray:
    """(K,) numbers of a calibration; a class that is never predicted has no number and gets the lowest logit."""
    numbers = [NEVER if value is None else value for value in values] if isinstance(values, list) else []
    if not numbers or (classes is not None and len(numbers) != classes):
        raise UserError(f"{name} is damaged: it should list one number per class")
    return np.array([number(name, value) for value in numbers])


def _of_saved_logits(source: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    described, numbers = read_calibration(source)
    affine = _affine(numbers, source / CALIBRATION_FILE, len(described.class_names) or None)
    if not affine or "confidence_weight_" in numbers:
        raise UserError(
            f"{described.method} in {source} is not a scale and a shift per class, so it has no such file; "
            "calibrate a run folder with it and export that"
        )
    names = described.class_names or [str(label) for label in range(len(affine["scale"]))]
    after = (SIGMOIDS,) if described.method == "platt" else ()
    return affine, {"formula": (AFFINE, *after, SOFTMAX, CHOICE), "class_names": names, "method": described.method}
