"""A `torch.export` program: a .pt2 file that torch runs without this library and without the model's source."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtail.errors import UserError
from longtail.exports.network import Deployment
from longtail.files.atomic import replacing, write_bytes
from longtail.runs.folder import Run

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
        difference = deployment.compare(_runner(temporary), "ONNX file")
    return difference, f"input 'images': {deployment.details['input']}; output 'logits'; {deployment.instructions}"


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # marked in sys.modules as not importable
        return False


def _convert(deployment: Deployment) -> Any:
    with _quiet(), torch.no_grad():
        program = deployment.program().run_decompositions(_decompositions())
        converted = torch.onnx.export(
            program,
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


def _decompositions() -> dict[Any, Callable[..., Any]]:
    table = torch.export.default_decompositions()
    table[torch.ops.aten._cdist_forward.default] = _distances
    return table


def _distances(first: Tensor, second: Tensor, p: float, mode: int | None) -> Tensor:
    """Euclidean distances (N, K) between rows; ONNX has no operator for them.

    They are computed from products, because differences would need memory for N x K x D numbers. The precision is
    enough for OLTR, which only needs the nearest centroid.
    """
    if p != 2:
        raise UserError(f"ONNX has no operator for the {p:g}-norm distance; export it as torch-export")
    squares = first.square().sum(-1, keepdim=True) + second.square().sum(-1).unsqueeze(-2)
    return (squares - 2 * first @ second.transpose(-1, -2)).clamp(min=0).sqrt()


def _runner(path: Path) -> Callable[[Tensor], Any]:
    runtime = import_module("onnxruntime")
    session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    return lambda images: session.run(["logits"], {"images": images.numpy()})[0]


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
