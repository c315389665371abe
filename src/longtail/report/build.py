"""From runs or saved logits to figures and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from longtail.core.files import write_json
from longtail.core.progress import Display
from longtail.data.images import DecodedImages, Images, MemoryImages
from longtail.distributed.world import SINGLE_PROCESS
from longtail.errors import UserError
from longtail.extraction.run import run_outputs
from longtail.methods import POSTHOC_METHODS, build_posthoc
from longtail.metrics.scores import evaluate_logits
from longtail.outputs.record import Outputs
from longtail.posthoc.marc import MARC
from longtail.report.figures import write_figures
from longtail.report.page import Context, page_data, write_page
from longtail.report.summary import Summary, summarise
from longtail.runs.folder import Run

BESIDE = ("disalign", "crt", "lws")


def report_run(
    runs: Sequence[Run], out: Path, *, root: str | None = None, workers: int = 0, display: Display | None = None
) -> tuple[Path, Summary]:
    """Report on the first run; further runs show the effect of the stage-one data on its calibration."""
    run, *rest = runs
    display = display or Display(quiet=True)
    options: dict[str, Any] = {"root": root, "workers": workers, "display": display}
    sizes = run.details["data"]["images"]
    split = next((name for name in ("test", "validation") if name in sizes), None)
    if split is None:
        raise UserError(f"{run.folder} has neither a test nor a validation split; a report needs held-out images")
    train = run_outputs(run, "train", SINGLE_PROCESS, views=1, **options)
    held_out = run_outputs(run, split, SINGLE_PROCESS, **options)
    validation = run_outputs(run, "validation", SINGLE_PROCESS, **options) if "validation" in sizes else None
    images = run.splits(root).split(split)
    context = Context(
        title=title_of(run),
        command=["longtail", "calibrate", str(run.folder), "--overwrite"],
        facts={
            "run": str(run.folder),
            "model": str(train.model)[:16],
            "calibrated on": f"{len(train)} {train.split} images, {train.views} augmented view",
            "versions": ", ".join(f"{name} {value}" for name, value in run.details["versions"].items()),
        },
        checkpoints=[checkpoint_row(other, run, split, options) for other in (run, *rest)] if rest else [],
        read_image=lambda index: picture(images, index),
    )
    return write_report(train, held_out, validation, context, out, display)


def write_report(
    train: Outputs, held_out: Outputs, validation: Outputs | None, context: Context, out: Path, display: Display
) -> tuple[Path, Summary]:
    """Figures, page and the numbers behind them."""
    names = BESIDE if train.features is not None and held_out.features is not None else ("lws",)
    others = {POSTHOC_METHODS[name].title.removeprefix("Decouple-"): build_posthoc(name, {}) for name in names}
    display.line("solving the operating points")
    summary = summarise(train, held_out, validation=validation, others=others)
    display.line("drawing")
    write_figures(summary, out / "figures")
    write_json(out / "report.json", page_data(summary, context))
    return write_page(summary, context, out / "index.html"), summary


def title_of(run: Run) -> str:
    """Data set, tail and backbone in a few words."""
    config = run.config
    tail = f"-LT {config.imbalance:g}" if config.profile != "none" else ""
    repaired = f", repaired by {run.details['calibration']['method']}" if "calibration" in run.details else ""
    return f"{config.data}{tail}, {config.backbone}{repaired}"


def checkpoint_row(model_run: Run, data_run: Run, split: str, options: dict[str, Any]) -> dict[str, Any]:
    """Another checkpoint, calibrated on the training images of `data_run` and scored on its held-out ones."""
    if model_run.class_names != data_run.class_names:
        raise UserError(f"{model_run.folder} and {data_run.folder} do not have the same classes")
    scores = []
    train = run_outputs(model_run, "train", SINGLE_PROCESS, views=1, data_run=data_run, **options)
    held_out = run_outputs(model_run, split, SINGLE_PROCESS, data_run=data_run, **options)
    marc = MARC().fit(train)
    for logits in (held_out.rows().read(slice(None)).numpy(), np.asarray(marc.transform(held_out))):
        scores.append(100 * evaluate_logits(logits, held_out.labels, held_out.class_counts).balanced)
    data = f"{title_of(model_run)} ({model_run.folder.name})"
    return {"data": data, "before": round(scores[0], 1), "after": round(scores[1], 1)}


def picture(images: Images, index: int) -> Image.Image:
    """One held-out image, as people see it."""
    if isinstance(images, MemoryImages):
        pixels = images.pixels[index].permute(1, 2, 0).numpy()
        return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
    assert isinstance(images, DecodedImages)
    return images.open(index)
