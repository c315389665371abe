"""`longtail extract`: outputs of a trained model, computed once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from longtail.cli.parsing import Output, RunData, parse

if TYPE_CHECKING:
    from longtail.data.imbalance import ClassSubsample
    from longtail.runs.folder import Run

HELP = """Run a trained model once over a split and keep features, logits and labels.

The file (safetensors) also holds the head's weight and bias, the class counts, the split and the
fingerprint of the model; calibrate, report and diagnose read it instead of running the model again.
`longtail calibrate` extracts by itself; use this command for other splits, more views or torchrun.

Examples:
  longtail extract runs/digits --split train --views 1
  longtail extract runs/inat --split train --dtype float16 --no-logits
  torchrun --nproc-per-node 8 -m longtail extract runs/imagenet --split train
"""


@dataclass(frozen=True)
class Extract(Output, RunData):
    """Which model, on what."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run."""
    split: Literal["train", "validation", "test"] = "train"
    """Which images."""
    views: int = 0
    """Augmented passes over the training images; 0 for clean images."""
    images_per_class: int | Literal["all", "auto"] = "all"
    """At most so many training images of every class; auto: as many as MARC needs."""
    seed: int = 0
    """Random seed that selects these images."""
    out: Path | None = None
    """File to write (default: RUN/outputs/SPLIT[-viewsV][-M-per-class-seedS].safetensors)."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the stored features and logits."""
    no_logits: bool = False
    """Store no logits; they are computed from the features when needed. Above 1 GB of logits this is the default."""
    device: str = "auto"
    """auto, cpu, cuda, …"""
    overwrite: bool = False
    """Replace the file if it exists."""


def main(words: list[str]) -> int:
    options = parse(Extract, words, "longtail extract", HELP)
    from longtail.distributed import join
    from longtail.errors import UserError
    from longtail.runs.folder import Run
    from longtail.runs.network import outputs_path, write_outputs

    display = options.display()
    with join(options.device) as world:
        run = Run.open(options.run).using(world, root=options.root, workers=options.workers, display=display)
        subsample = _subsample(options, run)
        path = options.out or outputs_path(run, options.split, options.views, subsample)
        if path.exists() and not options.overwrite:
            raise UserError(f"{path} exists already; choose another --out or replace it with --overwrite")
        write_outputs(
            run,
            options.split,
            path,
            views=options.views,
            subsample=subsample,
            dtype=options.dtype,
            keep_logits=False if options.no_logits else None,
        )
    display.line(f"written: {path}")
    options.print_json({"outputs": str(path)})
    return 0


def _subsample(options: Extract, run: Run) -> ClassSubsample | None:
    """Which training images to run; scikit-learn is imported only if they are not all."""
    if options.images_per_class == "all":
        return None
    from longtail.posthoc.inputs import chosen_images
    from longtail.posthoc.marc import MARC

    return chosen_images(options.images_per_class, MARC(), run.class_counts, options.seed)
