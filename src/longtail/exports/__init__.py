"""A finished run as a file for another program: ONNX, torch.export, safetensors with a model card, a bare head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longtail.errors import UserError, choose
from longtail.exports.card import write_package
from longtail.exports.formats import write_json_head, write_npz_head, write_onnx, write_program
from longtail.files.reading import resolved


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
    run: Path | str,
    out: Path | str,
    format: str = "onnx",
    *,
    with_preprocessing: bool = False,
    overwrite: bool = False,
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
