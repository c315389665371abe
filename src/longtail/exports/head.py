"""The last layer as plain numbers and its formula, for people with another framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from longtail.core.files import replacing, write_json
from longtail.errors import UserError
from longtail.networks.disalign_head import DisAlignHead
from longtail.networks.head import find_head, head_of
from longtail.runs.folder import RUN_FILE, Run
from longtail.tasks.calibrate import CALIBRATION_FILE

SOFTMAX = "probabilities = exp(logits) / sum(exp(logits))"
SIGMOIDS = "s = 1 / (1 + exp(-logits)); probabilities = s / sum(s)"
CHOICE = "predicted = class_names[argmax(logits)]"
LINEAR = "logits = features @ weight.T + bias"
AFFINE = "logits = scale * old_logits + shift"
DISALIGN = (
    "old_logits = features @ weight.T + bias",
    "confidence = 1 / (1 + exp(-(features @ confidence_weight + confidence_bias)))",
    "logits = old_logits + confidence * ((scale - 1) * old_logits + shift)",
)


def write_npz_head(source: Path, out: Path) -> tuple[None, str]:
    """The numbers as a .npz file that opens without pickle."""
    arrays, words = read_head(source)
    texts = {name: np.array(value) for name, value in words.items()}
    with replacing(out) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays, **texts)  # type: ignore[arg-type]
    return None, _say(words)


def write_json_head(source: Path, out: Path) -> tuple[None, str]:
    """The same as a JSON file."""
    arrays, words = read_head(source)
    write_json(out, {**words, **{name: array.tolist() for name, array in arrays.items()}})
    return None, _say(words)


def _say(words: dict[str, Any]) -> str:
    return "; ".join(words["formula"])


def read_head(source: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and texts that describe the last layer of a run, or a repair of saved logits."""
    calibration = source / CALIBRATION_FILE
    described = json.loads(calibration.read_text(encoding="utf-8")) if calibration.is_file() else None
    if described and not (source / RUN_FILE).is_file():
        return _of_saved_logits(source, described)
    run = Run.open(source)
    model = run.load_model()
    method = described["method"] if described else run.config.method
    arrays, mixed = _layer(model)
    affine = _affine(described) if described else {}
    words: dict[str, Any] = {
        "formula": DISALIGN if mixed else _formula(LINEAR, method),
        "features": f"input of the layer {find_head(model)!r}, (N, {arrays['weight'].shape[1]})",
        "class_names": run.class_names,
        "method": method,
    }
    if affine:
        words["formula_on_old_logits"] = _formula(AFFINE, method)
    return {**arrays, **affine, "class_counts": run.class_counts}, words


def _formula(logits: str, method: str) -> tuple[str, str, str]:
    return logits, SIGMOIDS if method == "platt" else SOFTMAX, CHOICE


def _layer(model: nn.Module) -> tuple[dict[str, np.ndarray], bool]:
    """The arrays of the last layer, and whether it is DisAlign's mixture."""
    path = find_head(model)
    linear = head_of(model)
    weight = linear.weight.detach().numpy()
    bias = np.zeros(len(weight), np.float32) if linear.bias is None else linear.bias.detach().numpy()
    parent = model.get_submodule(path.rpartition(".")[0])
    if not isinstance(parent, DisAlignHead):
        return {"weight": weight, "bias": bias}, False
    own = {name: value.detach().numpy() for name, value in parent.named_parameters() if "." not in name}
    return {"weight": weight, "bias": bias, **own}, True


def _affine(described: dict[str, Any]) -> dict[str, np.ndarray]:
    """Scale and shift per class on the logits of the model before, if the method is of that kind."""
    if "scale_" not in described or "confidence_weight_" in described:
        return {}
    return {"scale": np.array(described["scale_"]), "shift": np.array(described["shift_"])}


def _of_saved_logits(source: Path, described: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    affine = _affine(described)
    if not affine:
        raise UserError(
            f"{described['method']} in {source} is not a scale and a shift per class, so it has no such file; "
            "calibrate a run folder with it and export that"
        )
    names = described["class_names"] or [str(label) for label in range(len(affine["scale"]))]
    return affine, {
        "formula": _formula(AFFINE, described["method"]),
        "class_names": names,
        "method": described["method"],
    }
