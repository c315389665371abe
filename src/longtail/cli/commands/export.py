"""`longtail export`: a trained model for another program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from longtail.cli.parsing import Output, parse

HELP = """Write a trained model, plain or calibrated, for another program.

  onnx          the network for onnxruntime and others, any number of images at once; the command compares
                its logits with torch's to 1e-4 if onnxruntime is installed (pip install 'longtail[export]')
  torch-export  a .pt2 program that torch runs without this library; compared likewise
  safetensors   a folder: weights, run.json and a model card (README.md)
  npz, json     the last layer alone, with class names and its formula in three lines

The networks of onnx and torch-export take resized images with pixels from 0 to 1: normalisation is inside.
--with-preprocessing puts resizing inside too. A folder that `longtail calibrate FILE` wrote has no network;
npz and json write its scale and shift per class.

Examples:
  longtail export runs/digits/marc --format onnx --out digits.onnx
  longtail export runs/photos/marc --format onnx --out photos.onnx --with-preprocessing
  longtail export runs/digits/marc --format safetensors --out digits-marc
  longtail export runs/digits/marc --format json --out head.json
"""


@dataclass(frozen=True)
class Export(Output):
    """What to write, and where."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run, plain or calibrated."""
    format: Literal["onnx", "torch-export", "safetensors", "npz", "json"]
    """What to write."""
    out: Path
    """File to write; for safetensors a folder."""
    with_preprocessing: bool = False
    """onnx, torch-export: take images of any size, (N, H, W, 3) uint8, and resize them inside, to the same pixels as
    `longtail predict`. Slower than Pillow for large photographs: about a second for 12 megapixels."""
    overwrite: bool = False
    """Replace what is there."""


def main(words: list[str]) -> int:
    options = parse(Export, words, "longtail export", HELP)
    from longtail.exports import export

    written = export(
        options.run,
        options.out,
        options.format,
        with_preprocessing=options.with_preprocessing,
        overwrite=options.overwrite,
    )
    display = options.display()
    display.line(f"written: {written.out}")
    if written.largest_difference is not None:
        display.line(f"checked: its logits differ from torch's by at most {written.largest_difference:.1e}")
    display.line(written.note)
    options.print_json(written.to_dict())
    return 0
