"""A finished run as a file for another program: ONNX, torch.export, safetensors with a model card, a bare head."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longtail.errors import UserError, choose, number
from longtail.exports.card import write_package
from longtail.exports.network import Deployment
from longtail.files.atomic import replacing, write_bytes, write_json
from longtail.files.reading import resolved
from longtail.heads.kinds import saved_head
from longtail.posthoc.priors import NEVER
from longtail.runs.folder import Run
from longtail.runs.record import CALIBRATION_FILE, RUN_FILE
from longtail.tasks.calibration import read_calibration

NOTES = "longtail.json"


def write_program(source: Path, out: Path, with_preprocessing: bool = False) -> tuple[float, str]:
    """Write the file, read it back and compare its logits."""
    if out.suffix != ".pt2":
        raise UserError(f"torch reads such a program only from a file called ….pt2; choose --out {out.name}.pt2")
    deployment = Deployment.of_run(Run.open(source), with_preprocessing)
    archive = io.BytesIO()
    torch.export.save(deployment.program(), archive, extra_files={NOTES: json.dumps(deployment.details)})
    difference = deployment.compare(torch.export.load(io.BytesIO(archive.getvalue())).module(), "torch.export program")
    write_bytes(out, archive.getvalue())
    load = f"torch.export.load({str(out)!r}).module()(images)"
    return difference, f"{load} takes {deployment.details['input']}; {deployment.instructions}"


INSTALL = "pip install 'longtail[export]'"


def write_onnx(source: Path, out: Path, with_preprocessing: bool = False) -> tuple[float | None, str]:
    """Write the file and, if onnxruntime is installed, compare its logits with torch's."""
    for package in ("onnx", "onnxscript"):
        if not _installed(package):
            raise UserError(f"ONNX needs {package}: {INSTALL}")
    deployment = Deployment.of_run(Run.open(source), with_preprocessing)
    with replacing(out) as temporary:
        _convert(deployment).save(temporary)
        if not _installed("onnxruntime"):
            return None, f"not checked, because onnxruntime is not installed: {INSTALL}"
        session = import_module("onnxruntime").InferenceSession(
            temporary.read_bytes(), providers=["CPUExecutionProvider"]
        )
        difference = deployment.compare(
            lambda images: session.run(["logits"], {"images": images.numpy()})[0], "ONNX file"
        )
    return difference, f"input 'images': {deployment.details['input']}; output 'logits'; {deployment.instructions}"


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # marked in sys.modules as not importable
        return False


def _convert(deployment: Deployment) -> Any:
    with _quiet(), torch.no_grad():
        decompositions = torch.export.default_decompositions()
        decompositions[torch.ops.aten._cdist_forward.default] = _distances
        converted = torch.onnx.export(
            deployment.program().run_decompositions(decompositions),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=deployment.dynamic_axes,
            dynamo=True,
            verbose=False,
        )
    assert converted is not None
    for name, value in deployment.details.items():
        converted.model.metadata_props[name] = value if isinstance(value, str) else json.dumps(value)
    return converted


def _distances(first: Tensor, second: Tensor, p: float, mode: int | None) -> Tensor:
    """Euclidean distances (N, K) between rows; ONNX has no operator for them.

    They are computed from products, because differences would need memory for N x K x D numbers. The precision is
    enough for OLTR, which only needs the nearest centroid.
    """
    if p != 2:
        raise UserError(f"ONNX has no operator for the {p:g}-norm distance; export it as torch-export")
    squares = first.square().sum(-1, keepdim=True) + second.square().sum(-1).unsqueeze(-2)
    return (squares - 2 * first @ second.transpose(-1, -2)).clamp(min=0).sqrt()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the messages of torch's exporter, which warns about packages that are not used here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


SOFTMAX = "probabilities = exp(logits) / sum(exp(logits))"
SIGMOIDS = "logits = -log(1 + exp(-logits))"
CHOICE = "predicted = class_names[argmax(logits)]"
SEVERAL_LABELS = ("probabilities = 1 / (1 + exp(-logits))", "predicted = class_names where logits > 0")
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
    with replacing(out) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays, **{name: np.array(value) for name, value in texts.items()})  # type: ignore[arg-type]
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
        "features": f"input of the last layer of {run.config.backbone}, (N, {arrays['weight'].shape[1]})",
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
    last = {"platt": (SIGMOIDS, SOFTMAX, CHOICE), "multilabel": SEVERAL_LABELS}.get(described.method, (SOFTMAX, CHOICE))
    return affine, {"formula": (AFFINE, *last), "class_names": names, "method": described.method}


@dataclass(frozen=True)
class Exported:
    """What was written: `largest_difference` is that of the logits from torch's, None if they were not compared."""

    format: str
    out: Path
    largest_difference: float | None
    note: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "out": str(self.out), "checked": self.largest_difference is not None}


# Format → function that writes a run folder to a path; returns (largest difference from torch's logits, a message).
FORMATS: dict[str, Callable[..., tuple[float | None, str]]] = {
    "onnx": write_onnx,
    "torch-export": write_program,
    "safetensors": write_package,
    "npz": write_npz_head,
    "json": write_json_head,
}
GRAPHS = ("onnx", "torch-export")  # formats with the whole network, into which preprocessing can be included


def export(
    run: Path | str, out: Path | str, format: str = "onnx", *, with_preprocessing: bool = False, overwrite: bool = False
) -> Exported:
    """Write a finished run, plain or calibrated, for another program.

    Args:
        run: folder of a run; for `npz` and `json` also a folder that `longtail calibrate FILE` wrote.
        out: the file to write; for `safetensors` a folder.
        format: onnx, torch-export, safetensors, npz or json.
        with_preprocessing: for `onnx` and `torch-export`: the file takes images of any size, (N, H, W, 3) uint8, and
            resizes them itself, to the same pixels as this library.
        overwrite: replace what is there.
    """
    writer = FORMATS[choose("format", format, FORMATS)]
    if with_preprocessing and format not in GRAPHS:
        raise UserError(f"preprocessing can be put into {' and '.join(GRAPHS)} files, not into {format}")
    source, target = Path(run), Path(out)
    if format == "safetensors" and resolved(target) == resolved(source):
        raise UserError(f"{target} is the run itself; choose another --out")
    if target.exists() and not overwrite:
        raise UserError(f"{target} exists already; choose another --out or replace it with --overwrite")
    if target.exists() and target.is_dir() != (format == "safetensors"):
        kind = "folder" if format == "safetensors" else "file"
        raise UserError(f"the format {format} is a {kind} and {target} is not; choose another --out")
    options = {"with_preprocessing": True} if with_preprocessing else {}
    return Exported(format, target, *writer(source, target, **options))
