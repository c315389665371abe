"""Reading weights from a local file, without ever running code that the file contains."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from longtail.backbones import BACKBONES, build_backbone
from longtail.errors import UserError
from longtail.files.reading import reading, require_file, require_small_archive
from longtail.files.tensors import read_tensors

WRAPPERS = ("state_dict", "model", "model_state_dict", "state_dict_best", "net")
HEADS = ("fc.", "classifier.", "head.", "linear.")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` or `.pth` file by name."""
    if not path.is_file():
        raise UserError(f"weights file {path} does not exist")
    if path.suffix == ".safetensors":
        return read_tensors(path)[0]
    require_file(path)
    with reading(path, "a file of plain weights (tensors only, no code)"):
        if zipfile.is_zipfile(path):
            require_small_archive(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    for name in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not any(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path} holds no named tensors")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def load_backbone(backbone: nn.Module, path: Path) -> None:
    """Load published weights into a backbone; the classifier in the file is ignored.

    Names may carry a prefix (`module.`, `backbone.`, …); every tensor of the backbone must be in
    the file with its shape.
    """
    backbone.load_state_dict(_fitting(read_weights(path), backbone.state_dict(), path)[0], strict=False)


def backbone_of(path: Path) -> str | None:
    """The name of the backbone whose weights a file holds; None if no backbone of this library fits."""
    weights = read_weights(path)
    for name in BACKBONES:
        with torch.device("meta"):
            wanted = build_backbone(name).state_dict()
        try:
            _, unused = _fitting(weights, wanted, path)
        except UserError:
            continue
        if not unused:  # a deeper network would have more
            return name
    return None


def _fitting(weights: dict[str, Tensor], wanted: dict[str, Tensor], path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a file that fit a backbone, and the names of unused backbone tensors."""
    first = next(iter(wanted))
    prefixes = [name[: -len(first)] for name in weights if name.endswith(first) and not name.startswith(HEADS)]
    if not prefixes:
        raise UserError(f"{path} holds weights of another network: no tensor named …{first}")
    prefix = prefixes[0]
    fitting = {name: weights[prefix + name] for name in wanted if prefix + name in weights}
    for name, tensor in fitting.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"{path}: {prefix}{name} has shape {tuple(tensor.shape)}, "
                f"this backbone needs {tuple(wanted[name].shape)}"
            )
    missing = [name for name in wanted if name not in fitting and not name.endswith("num_batches_tracked")]
    if missing:
        raise UserError(f"{path} lacks {len(missing)} of the backbone's {len(wanted)} tensors, first {missing[0]}")
    others = (name.removeprefix(prefix) for name in weights if name.startswith(prefix))
    return fitting, [name for name in others if name not in wanted and not name.startswith(HEADS)]
