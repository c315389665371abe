"""The command `report`: open a run, gather its outputs and calibrations, summarise them, write page and figures.

A report shows what `calibrate` and `diagnose` have written to the folder of the run. Only the operating points, MARC at
several gammas, are fitted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from longtail.data.images import DecodedImages, Images, MemoryImages
from longtail.errors import UserError
from longtail.files.atomic import replacing_folder, require_own, write_json
from longtail.files.progress import QUIET, Display
from longtail.files.text import command_on
from longtail.heads.kinds import saved_head
from longtail.metrics.scores import Metrics
from longtail.outputs.readers import read_held_out, read_outputs
from longtail.outputs.record import Outputs
from longtail.posthoc.marc import MARC
from longtail.report.figures import write_figures
from longtail.report.page import Context, page_data, write_page
from longtail.report.summary import Calibrated, Point, Summary, scores, summarise
from longtail.runs.folder import Run
from longtail.tasks.calibrate_run import calibrations_of
from longtail.tasks.calibration import read_calibration
from longtail.tasks.diagnose import read_diagnosis

OWN_FILES = PAGE_FILE, NUMBERS_FILE, FIGURES = "index.html", "report.json", "figures"
# Target priors of the slider, as powers of the training prior: as in training, uniform, and beyond.
TARGETS = tuple(round(1 - 0.1 * step, 1) for step in range(16))
USUAL_GAMMA = 1.2  # MARC's default
USED = "on the validation images that the method was fitted or chosen on: higher than on new images"


def report_run(
    runs: Sequence[Run], out: Path, *, root: str | None = None, workers: int = 0, display: Display = QUIET
) -> tuple[Path, Summary]:
    """Report on the first run and its calibrations; further runs show the effect of the stage-one data.

    A calibrated run is compared with the run that was calibrated. For a trained run, the newest calibration in its
    folder is shown, the others beside it; if there is none, MARC at its usual gamma.
    """
    require_own(out, OWN_FILES, "a report")  # checked before minutes of work
    first, *rest = runs
    run = Run.open(first.calibration.run) if first.calibration else first
    split = run.scored_split
    if split is None:
        raise UserError(f"{run.folder} has neither a test nor a validation split; a report needs held-out images")
    run = run.using(root=root, workers=workers, display=display)
    train, held_out = run.outputs("train", views=1), run.outputs(split)
    validation = run.outputs("validation") if "validation" in run.split_sizes else None
    calibrated = stored_calibrations(first, run, held_out, validation)
    gammas = fit_gammas(train, display)
    calibrated = calibrated or [usual_marc(gammas, train, held_out)]
    diagnosis = read_diagnosis(run)
    shown = calibrated[0]
    display.line(f"about {shown.origin}")
    if shown.caution:
        display.line(f"scores are {shown.caution}; {command_on('diagnose', run.folder, root)} corrects for it")
    if diagnosis is None:
        display.line(f"not diagnosed yet: {command_on('diagnose', run.folder, root)} adds a recommendation")
    images = run.images(split)
    context = Context(
        title=title_of(run),
        command=command_on("calibrate", run.folder, root, "--overwrite", "--images-per-class", "all"),
        facts={
            "run": str(run.folder),
            "model": str(train.model)[:16],
            "calibration": shown.origin,
            **({"scores": shown.caution} if shown.caution else {}),
            "operating points": f"fitted on all {len(train):,} training images",
            "versions": ", ".join(f"{name} {value}" for name, value in run.record.versions.items()),
        },
        checkpoints=[
            checkpoint_row(other, run, split, root, workers, display) for other in ((run, *rest) if rest else ())
        ],
        read_image=lambda index: picture(images, index),
        caution=f"They are {shown.caution}." if shown.caution else "",
        diagnosis=diagnosis,
    )
    summary = summarise(held_out, validation, calibrated, gammas)
    return write_report(summary, context, out, display), summary


def report_files(
    source: Path,
    test: Path,
    validation: Path | None,
    out: Path,
    display: Display = QUIET,
    *,
    label_column: str | None = None,
) -> tuple[Path, Summary]:
    """Report on saved logits: MARC, fitted on the training logits, and its operating points."""
    require_own(out, OWN_FILES, "a report")
    train = read_outputs(source, label_column=label_column)
    held_out = read_held_out(test, "test", train, label_column)
    chosen_on = read_held_out(validation, "validation", train, label_column) if validation else None
    gammas = fit_gammas(train, display)
    command = command_on("calibrate", source, None, "--test", str(test), "--out", "calibrated", "--overwrite")
    context = Context(source.stem, command, {"training logits": str(source), "test logits": str(test)})
    summary = summarise(held_out, chosen_on, [usual_marc(gammas, train, held_out)], gammas)
    return write_report(summary, context, out, display), summary


def write_report(summary: Summary, context: Context, out: Path, display: Display) -> Path:
    """Write figures, page and their numbers to a folder, atomically; returns the page."""
    display.line("drawing")
    with replacing_folder(out, OWN_FILES, "a report") as folder:
        write_figures(summary, folder / FIGURES)
        numbers = page_data(summary, context)
        write_json(folder / NUMBERS_FILE, numbers)
        write_page(summary, context, folder / PAGE_FILE, numbers)
    return out / PAGE_FILE


def fit_gammas(train: Outputs, display: Display = QUIET) -> dict[float, MARC]:
    """MARC at every gamma of the slider, the only fit of a report."""
    display.line(f"fitting MARC at several gammas on {len(train):,} {train.split} images, for the operating points")
    return MARC().fit_path(train)


def usual_marc(gammas: dict[float, MARC], train: Outputs, held_out: Outputs) -> Calibrated:
    """MARC at its default gamma, for a model without a calibration."""
    marc = gammas[USUAL_GAMMA]
    origin = f"MARC, fitted for this report on {len(train):,} {train.split} images ({_views(train.views)})"
    return Calibrated("MARC", np.asarray(marc.transform(held_out)), marc.n_parameters_, origin)


def stored_calibrations(first: Run, run: Run, held_out: Outputs, validation: Outputs | None) -> list[Calibrated]:
    """The calibrations of a run in its folder: that of `first` if it is one, then the newest."""
    folders = dict.fromkeys([*([first.folder] if first.calibration else []), *calibrations_of(run)])
    found = [read_stored(folder, held_out, validation) for folder in folders]
    titles = Counter(one.title for one in found)
    return [
        replace(one, title=f"{one.title} ({folder.name})") if titles[one.title] > 1 else one
        for folder, one in zip(folders, found, strict=True)
    ]


def read_stored(folder: Path, held_out: Outputs, validation: Outputs | None = None) -> Calibrated:
    """The calibration in a folder: its head, applied to the held-out features."""
    run = Run.open(folder)
    described, numbers = read_calibration(folder, model=run.model_identity)
    head = saved_head(run.model())

    def logits(outputs: Outputs) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(head(torch.from_numpy(np.array(outputs.features)).float()))

    chosen = ", ".join(f"{name} {value:g}" for name, value in described.chosen.items())
    where, settings = described.fitted_on, f" ({chosen})" if chosen else ""
    origin = f"{described.title}{settings} in {folder}, fitted on {where.in_words()} ({_views(where.views)})"
    used = held_out.split == "validation" and (where.held_out or where.split == "validation")
    calibrated = logits(held_out)
    targets: list[Point] = []
    if validation is not None and {"log_target_", "log_prior_"} <= numbers.keys():
        both = [(calibrated, held_out), (logits(validation), validation)]
        targets = target_points(numbers["log_target_"], numbers["log_prior_"], both)
    return Calibrated(described.title, calibrated, described.parameters, origin, USED if used else "", targets)


def target_points(
    log_target: Sequence[float | None], log_prior: Sequence[float], calibrated: list[tuple[np.ndarray, Outputs]]
) -> list[Point]:
    """Scores of logits, which are right for one target prior, when they are shifted to others."""
    if None in log_target:
        return []  # a class that is never predicted has lost its logit
    old, prior = np.array(log_target, dtype=np.float32), np.array(log_prior, dtype=np.float32)
    shifted = {power: [(logits + power * prior - old, own) for logits, own in calibrated] for power in TARGETS}
    return [Point(power, *(scores(*pair) for pair in pairs)) for power, pairs in shifted.items()]


def _views(views: int) -> str:
    """How often a method has seen each image, in words."""
    return f"{views} augmented {'view' if views == 1 else 'views'} of each" if views else "clean images"


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
    model_run = model_run.using(root=root, workers=workers, display=display)
    held_out = model_run.outputs(split, images_of=data_run)
    display.line(f"fitting MARC on the network of {model_run.folder} and the training images of {data_run.folder}")
    marc = MARC().fit(model_run.outputs("train", views=1, images_of=data_run))
    before = scores(held_out.rows().read(slice(None)).numpy(), held_out)
    return before, scores(np.asarray(marc.transform(held_out)), held_out)


def picture(images: Images, index: int) -> Image.Image:
    """One held-out image, ready to be shown."""
    if isinstance(images, MemoryImages):
        pixels = images.pixels[index].permute(1, 2, 0).numpy()
        return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
    assert isinstance(images, DecodedImages)
    return images.open(index)
