"""From runs or saved logits to figures and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from longtail.core.files import replacing_folder, require_own, write_json
from longtail.core.progress import QUIET, Display
from longtail.core.text import command_on
from longtail.data.images import DecodedImages, Images, MemoryImages
from longtail.errors import UserError
from longtail.extraction.run import Extractor
from longtail.methods import POSTHOC_METHODS, build_posthoc, candidate_title
from longtail.metrics.scores import Metrics, evaluate_logits
from longtail.networks.saved_heads import saved_head
from longtail.outputs.record import Outputs
from longtail.posthoc.marc import MARC
from longtail.report.figures import write_figures
from longtail.report.page import Context, page_data, write_page
from longtail.report.summary import Calibrated, Summary, fitted, summarise
from longtail.runs.folder import Run
from longtail.tasks.calibrate_run import calibrations_of
from longtail.tasks.calibration import fitted_value, read_calibration

OWN_FILES = PAGE_FILE, NUMBERS_FILE, FIGURES = "index.html", "report.json", "figures"
BESIDE = ("marc", "disalign", "crt", "lws")


def report_run(
    runs: Sequence[Run], out: Path, *, root: str | None = None, workers: int = 0, display: Display = QUIET
) -> tuple[Path, Summary]:
    """Report on the first run and its calibration; further runs show the effect of the stage-one data.

    For a calibrated run, the report compares it with the run that was calibrated. For a trained run, it shows the
    newest calibration in its folder; if there is none, MARC is fitted for the report.
    """
    first, *rest = runs
    opened = opened_run(first, root=root, workers=workers, display=display)
    run, train, split, facts = opened.run, opened.train, opened.held_out.split, opened.facts
    images = run.images(split, opened.extractor.splits)
    context = Context(
        title=title_of(run),
        command=command_on("calibrate", run.folder, root, "--overwrite", "--images-per-class", "all"),
        facts={
            "run": str(run.folder),
            "model": str(train.model)[:16],
            **facts,
            "operating points": f"fitted on all {len(train):,} training images",
            "versions": ", ".join(f"{name} {value}" for name, value in run.record.versions.items()),
        },
        checkpoints=[
            checkpoint_row(other, run, split, root, workers, display) for other in ((run, *rest) if rest else ())
        ],
        read_image=lambda index: picture(images, index),
        caution=f"They are {facts['scores']}." if "scores" in facts else "",
    )
    display.line(f"about {facts['calibration']}")
    if "scores" in facts:
        display.line(f"scores are {facts['scores']}; {command_on('diagnose', run.folder, root)} corrects for it")
    return write_report(train, opened.held_out, opened.validation, opened.after, context, out, display)


@dataclass(frozen=True)
class Opened:
    """A run before and after its calibration: outputs of its splits, and the origin of the calibration."""

    run: Run
    extractor: Extractor
    train: Outputs
    held_out: Outputs
    validation: Outputs | None
    after: Calibrated
    facts: dict[str, str]


def opened_run(run: Run, *, root: str | None, workers: int, display: Display) -> Opened:
    """A run (of a calibrated run, the run that was calibrated) and the calibration to show."""
    calibrated = run.folder if run.calibration else next(iter(calibrations_of(run)), None)
    run = Run.open(run.calibration.run) if run.calibration else run
    split = run.scored_split
    if split is None:
        raise UserError(f"{run.folder} has neither a test nor a validation split; a report needs held-out images")
    extractor = Extractor(run, root=root, workers=workers, display=display)
    train, held_out = extractor.outputs("train", views=1), extractor.outputs(split)
    validation = extractor.outputs("validation") if "validation" in run.split_sizes else None
    after, facts = _fitted_marc(train, held_out, validation) if calibrated is None else _stored(calibrated, held_out)
    return Opened(run, extractor, train, held_out, validation, after, facts)


def _fitted_marc(train: Outputs, held_out: Outputs, validation: Outputs | None) -> tuple[Calibrated, dict[str, str]]:
    facts = {
        "calibration": f"MARC, fitted for this report on {len(train):,} {train.split} images ({_seen_as(train.views)})"
    }
    return fitted(MARC(), "MARC", "marc", train, held_out, validation), facts


def _seen_as(views: int) -> str:
    """How often a method has seen each image, in words."""
    return f"{views} augmented {'view' if views == 1 else 'views'} of each" if views else "clean images"


def _stored(folder: Path, held_out: Outputs) -> tuple[Calibrated, dict[str, str]]:
    """The calibration in a folder, applied to the held-out features by its own head."""
    run = Run.open(folder)
    described, numbers = read_calibration(folder, model=run.model_identity)
    head = saved_head(run.load_model())
    with torch.no_grad():
        logits = head(torch.from_numpy(np.array(held_out.features)).float()).numpy()
    chosen = ", ".join(f"{name} {value:g}" for name, value in described.chosen.items())
    if choice := fitted_value(numbers, "choice_"):
        chosen = f"it chose {candidate_title(str(choice))}"
    where = described.fitted_on
    facts = {
        "calibration": f"{described.title}{f' ({chosen})' if chosen else ''} in {folder}, fitted on {where.in_words()} "
        f"({_seen_as(where.views)})"
    }
    if held_out.split == "validation" and (where.held_out or where.split == "validation"):
        facts["scores"] = "on the validation images that the method was fitted or chosen on: higher than on new images"
    return Calibrated(described.title, described.method, logits, described.parameters), facts


def write_report(
    train: Outputs,
    held_out: Outputs,
    validation: Outputs | None,
    after: Calibrated,
    context: Context,
    out: Path,
    display: Display,
) -> tuple[Path, Summary]:
    """Write figures, page and their numbers to a folder, atomically."""
    require_own(out, OWN_FILES, "a report")  # checked before minutes of work
    has_features = train.features is not None and held_out.features is not None
    others = []
    for name in BESIDE:
        known, method = POSTHOC_METHODS[name], build_posthoc(name, {})
        if name != after.method and (has_features or not method.needs_features):
            others.append(fitted(method, known.title.removeprefix("Decouple-"), name, train, held_out, validation))
    display.line("solving the operating points")
    summary = summarise(train, held_out, validation=validation, after=after, others=others)
    display.line("drawing")
    with replacing_folder(out, OWN_FILES, "a report") as folder:
        write_figures(summary, folder / FIGURES)
        write_json(folder / NUMBERS_FILE, page_data(summary, context))
        write_page(summary, context, folder / PAGE_FILE)
    return out / PAGE_FILE, summary


def title_of(run: Run) -> str:
    """Data set, tail and backbone in a few words."""
    config = run.config
    tail = f"-LT {config.imbalance:g}" if config.profile != "none" else ""
    return f"{run.data_name}{tail}, {config.backbone}"


def checkpoint_row(
    model_run: Run, data_run: Run, split: str, root: str | None, workers: int, display: Display
) -> dict[str, Any]:
    """Another checkpoint, calibrated on the training images of `data_run` and scored on its held-out ones."""
    before, after = calibrated_elsewhere(model_run, data_run, split, root, workers, display)
    data = f"{title_of(model_run)} ({model_run.folder.name})"
    return {"data": data, "before": round(100 * before.balanced, 1), "after": round(100 * after.balanced, 1)}


def calibrated_elsewhere(
    model_run: Run, data_run: Run, split: str, root: str | None, workers: int, display: Display
) -> tuple[Metrics, Metrics]:
    """A network before and after MARC on the training images of another run, scored on its held-out images."""
    if model_run.class_names != data_run.class_names:
        raise UserError(f"{model_run.folder} and {data_run.folder} do not have the same classes")
    extractor = Extractor(model_run, data_run=data_run, root=root, workers=workers, display=display)
    held_out = extractor.outputs(split)
    marc = MARC().fit(extractor.outputs("train", views=1))
    before, after = (
        evaluate_logits(logits, held_out.labels, held_out.counts_for_groups)
        for logits in (held_out.rows().read(slice(None)).numpy(), np.asarray(marc.transform(held_out)))
    )
    return before, after


def picture(images: Images, index: int) -> Image.Image:
    """One held-out image, ready to be shown."""
    if isinstance(images, MemoryImages):
        pixels = images.pixels[index].permute(1, 2, 0).numpy()
        return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
    assert isinstance(images, DecodedImages)
    return images.open(index)
