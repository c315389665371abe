"""The folder of a calibration: the fitted numbers, the scores before and after, the model or its head.

    OUT/calibration.json             the method, its settings and numbers, what it was fitted on
    OUT/before-after-SPLIT.json      scores of a held-out split
    OUT/model.safetensors, run.json  of a run: the calibrated network, a run folder of its own
    OUT/SPLIT-calibrated.safetensors, head.safetensors   of saved logits: calibrated logits, and the head if it is known

The folder is written under a temporary name and then renamed, so its files always belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtail.errors import UserError
from longtail.files.atomic import write_json
from longtail.files.records import FORMAT, as_record, format_of, read_json
from longtail.files.tensors import write_tensors
from longtail.heads.fold import linear_layer
from longtail.methods import PostHocMethod
from longtail.metrics.intervals import Fallen, collapsed_classes, fallen_classes
from longtail.metrics.scores import Metrics, predictions_of, score_predictions
from longtail.outputs.readers import LabelOutputs
from longtail.outputs.record import Outputs
from longtail.posthoc.affine import AffinePostHoc
from longtail.posthoc.base import PostHoc
from longtail.posthoc.held_out import samples_in_common
from longtail.posthoc.inputs import from_outputs
from longtail.posthoc.solver.linear import LinearHead
from longtail.runs.record import CALIBRATION_FILE, RUN_FILES, RUN_FOLDERS

CALIBRATED = "-calibrated.safetensors"
KIND = "a calibration"
# Everything that longtail commands write to such a folder; a folder with anything else is not replaced.
OWN_FILES = (*RUN_FILES, *RUN_FOLDERS)


@dataclass(frozen=True)
class FittedOn:
    """The outputs that a method was fitted on; `seen` if the network was trained on their images."""

    split: str
    seen: bool
    views: int
    samples: int
    model: str | None
    digest: str | None
    images_per_class: int | None = None
    """At most so many images of each class; None: all of them."""
    images_seed: int | None = None
    held_out: int | None = None
    """Validation samples that the fit or the choice of a setting also used; None: it used none."""

    @classmethod
    def of(cls, outputs: Outputs, held_out: Outputs | None = None, *, frozen: bool = False) -> FittedOn:
        seen = outputs.split == "train" and not frozen
        names = ("split", "views", "model", "digest", "images_per_class", "images_seed")
        also = None if held_out is None or held_out is outputs else len(held_out)
        return cls(seen=seen, samples=len(outputs), held_out=also, **{name: getattr(outputs, name) for name in names})

    @property
    def used_validation(self) -> bool:
        """Whether the fit, or the choice of a setting, used validation samples."""
        return bool(self.held_out) or self.split == "validation"

    def in_words(self) -> str:
        """The outputs, and whether the network has seen their images.

        >>> FittedOn("train", True, 1, 6487, None, None, held_out=726).in_words()
        '6,487 train images, which the network has seen, and 726 validation images, which it has not seen'
        """
        text = f"{self.samples:,} {self.split} images, which the network has {'' if self.seen else 'not '}seen"
        if self.held_out is None:
            return text
        return f"{text}, and {self.held_out:,} validation images, which it has not seen"


@dataclass(frozen=True)
class CalibrationFile:
    """The fields of `calibration.json` that readers need; the file also has the fitted numbers."""

    method: str
    title: str
    paper: str
    settings: dict[str, Any]
    chosen: dict[str, float]
    parameters: int | None
    fitted_on: FittedOn
    result: dict[str, Any]
    class_names: list[str]
    model: str | None
    """Identity of the calibrated model, None for saved logits."""
    format: int = FORMAT


@dataclass(frozen=True)
class Comparison:
    """Scores of one split before and after, and the classes that fell by more than their interval.

    `used`: the method was fitted or chosen on these samples, so the scores after are higher than on new samples.
    `missing`: the classes without a sample; the scores are over the others.
    `collapsed`: of the fallen classes, large ones that are hardly recognised any more.
    """

    split: str
    before: Metrics
    after: Metrics
    fallen: list[Fallen]
    used: bool = False
    missing: list[str] = field(default_factory=list)
    collapsed: list[Fallen] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        scores = {"before": self.before.to_dict(), "after": self.after.to_dict()}
        fallen = [asdict(one) for one in self.fallen]
        return {"split": self.split, **scores, "fallen": fallen, "used": self.used, "missing": self.missing}


def compare_outputs(outputs: Outputs, calibrated: np.ndarray, fitted_on: Sequence[Outputs] = ()) -> Comparison:
    """Score outputs as they are and calibrated, (N, K), by a method that was fitted or chosen on `fitted_on`."""
    counts, labels = outputs.counts_for_groups, outputs.labels
    stored = (chunk.numpy() for _, chunk in outputs.rows().chunks())
    before = predictions_of(stored, labels)
    after = predictions_of((calibrated[rows] for rows in outputs.rows().slices()), labels)
    fallen = fallen_classes(before.classes == labels, after.classes == labels, labels, outputs.names)
    old, new = (score_predictions(predictions, labels, counts) for predictions in (before, after))
    used = any(one is outputs or _is_among(outputs, one) for one in fitted_on)
    collapsed = collapsed_classes(fallen, outputs.names, counts)
    return Comparison(outputs.split, old, new, fallen, used, outputs.missing_classes, collapsed)


def _is_among(outputs: Outputs, others: Outputs) -> bool:
    """Whether samples are among others; augmented views of them are not recognised, and not compared."""
    if others.views != outputs.views:
        return False
    first, second = (from_outputs(one, need_every_class=False) for one in (others, outputs))
    return samples_in_common(first, second) > 0


def write_calibration(
    folder: Path,
    method: PostHoc,
    described: PostHocMethod,
    name: str,
    fitted_on: FittedOn,
    model: str | None,
    class_names: Sequence[str],
) -> None:
    """Write the fitted numbers and the formula, readable without this library."""
    record = CalibrationFile(
        method=name,
        title=described.title,
        paper=described.paper,
        settings=_plain(method.get_params(deep=False)),
        chosen=method.chosen_,
        parameters=getattr(method, "n_parameters_", None),
        fitted_on=fitted_on,
        result=vars(method.result_),
        class_names=list(class_names),
        model=model,
    )
    numbers = {**asdict(record), **_numbers(method)}
    if isinstance(method, AffinePostHoc):
        numbers["formula"] = "new_logit[j] = scale_[j] * logit[j] + shift_[j]"
    write_json(folder / CALIBRATION_FILE, numbers)


def write_head(folder: Path, method: PostHoc, outputs: Outputs | LabelOutputs) -> None:
    """Write the calibrated head of saved logits, if the file has the head."""
    if outputs.head_weight is None:
        return
    bias = None if outputs.head_bias is None else torch.from_numpy(outputs.head_bias).float()
    head = method.head(linear_layer(torch.from_numpy(outputs.head_weight).float(), bias))
    write_tensors(folder / "head.safetensors", head.state_dict(), {"head": type(head).__name__})


def read_calibration(folder: Path, *, model: str | None = None) -> tuple[CalibrationFile, dict[str, Any]]:
    """The record and fitted numbers of a calibration folder; with `model`, raises if they belong to another."""
    path = folder / CALIBRATION_FILE
    values = read_json(path)
    if format_of(values, path) == 0:
        raise UserError(f"{path} was written by an older longtail; calibrate again")
    described = as_record(CalibrationFile, values, path)
    if model is not None and described.model != model:
        raise UserError(f"{path} does not belong to the model beside it; calibrate again with --overwrite")
    return described, {key: value for key, value in values.items() if key.endswith("_")}


def fitted_value(numbers: Any, name: str) -> Any:
    """A fitted attribute of a method, or of the method inside it; None if neither has it.

    >>> fitted_value({"temperature_": 1.5, "method_": {"model_prior_": "train"}}, "model_prior_")
    'train'
    """
    while isinstance(numbers, dict):
        if name in numbers:
            return numbers[name]
        numbers = numbers.get("method_")
    return None


@dataclass(frozen=True)
class ScoresFile:
    """What readers need of `before-after-SPLIT.json`."""

    model: str | None
    split: str
    before: dict[str, Any]
    after: dict[str, Any]
    fallen: list[Fallen] = field(default_factory=list)
    used: bool = False


def read_scores(path: Path, model: str) -> ScoresFile | None:
    """Scores before and after that belong to this model; None if there are none."""
    values = read_json(path) if path.is_file() else {}
    return as_record(ScoresFile, values, path) if values.get("model") == model else None


def _numbers(method: PostHoc) -> dict[str, Any]:
    """What was fitted; in `method_`, what the method inside fitted (before a temperature)."""
    names = [name for name in vars(method) if name.endswith("_") and name[0] != "_"]
    numbers = {name: _plain(vars(method)[name]) for name in names if name not in ("result_", "classes_")}
    if (inner := method.wrapped) is None:
        return numbers
    own = {key: value for key, value in _numbers(inner).items() if key not in ("set_scores_", "prior_check_")}
    return {**numbers, "method_": {**_plain(inner), **own}}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        listed = [None if item == -np.inf else item for item in value.tolist()] if value.ndim == 1 else value.tolist()
        return listed if value.ndim <= 1 else f"array of shape {value.shape}, see the weights"
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, PostHoc):
        return {"class": type(value).__name__, **_plain(value.get_params(deep=False))}
    if isinstance(value, LinearHead):
        return f"linear head of shape {value.weight.shape}, folded into the weights"
    if is_dataclass(value):  # scores for prediction sets, the trial of a prior estimate
        return asdict(value)  # type: ignore[arg-type]
    return value.item() if isinstance(value, np.generic) else value
