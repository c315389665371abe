"""Tensors on disk with a JSON header: safetensors, so that opening a file never runs code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtail.core.files import replacing, reserve
from longtail.core.layout import Layout, chunk_digests, opened
from longtail.core.mapped import check

KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TYPES = {name: dtype for dtype, name in KINDS.items()}


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Tensors and a JSON header as one safetensors file, written atomically."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    layout = Layout.of({name: (KINDS[tensor.dtype], tuple(tensor.shape)) for name, tensor in plain.items()}, header)
    assert layout.digests is not None
    chunk = layout.digests.chunk
    begin = layout.with_digests({name: chunk_digests(_bytes(tensor), chunk) for name, tensor in plain.items()}).encode()
    with replacing(path) as temporary, temporary.open("wb") as file:
        reserve(file, len(begin) + layout.size, path)
        file.write(begin)
        for tensor in plain.values():
            file.write(_bytes(tensor).data)


def _bytes(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def read_header(path: Path) -> dict[str, Any]:
    """The header alone."""
    with opened(path) as (_, layout, _):
        return layout.details


def has_digests(path: Path) -> bool:
    """Whether a file holds digests of its content, as everything that this library writes does."""
    with opened(path) as (_, layout, _):
        return layout.digests is not None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header that `write_tensors` wrote; raises if a digest does not match."""
    tensors = {}
    with opened(path) as (file, layout, begin):
        for name, entry in layout.entries.items():
            tensor = torch.empty(entry.shape, dtype=TYPES[entry.kind])
            content = _bytes(tensor)
            file.seek(begin + entry.start)
            if file.readinto(content) != len(content):  # type: ignore[attr-defined]
                raise ValueError("it is cut short")
            if layout.digests:
                for number in range(-(-len(content) // layout.digests.chunk)):
                    check(content, path, name, layout.digests, number)
            tensors[name] = tensor
    return tensors, layout.details
