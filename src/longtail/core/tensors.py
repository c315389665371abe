"""Tensors on disk with a JSON header: safetensors, so that opening a file never runs code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longtail.core.files import replacing
from longtail.errors import UserError


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Tensors and a JSON header as one safetensors file, written atomically."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(plain, temporary, metadata={"longtail": json.dumps(header)})


def read_header(path: Path) -> dict[str, Any]:
    """The header alone."""
    return _read(path, with_tensors=False)[1]


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote."""
    return _read(path, with_tensors=True)


def _read(path: Path, *, with_tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("longtail", "{}"))
            return {name: file.get_tensor(name) for name in (file.keys() if with_tensors else ())}, header
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file: {error}") from error
