"""The command `report`: open a run, gather its outputs and calibrations, summarise them, write page and figures.

A report shows what `calibrate` and `diagnose` have written to the folder of the run. Nothing is fitted,
except the usual method for a run without a calibration.
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
from longtail.files.atomic import replacing_folder, require_free, write_json
from longtail.files.progress import QUIET, Display
from longtail.files.text import command_on
from longtail.heads.kinds import saved_head
from longtail.methods import POSTHOC_METHODS, build_posthoc, default_posthoc
from longtail.metrics.scores import Metrics
from longtail.outputs.readers import read_held_out, read_outputs
from longtail.outputs.record import Outputs
from longtail.posthoc.base import PostHoc
from longtail.posthoc.costs import read_costs
from longtail.posthoc.inputs import fit_outputs
from longtail.posthoc.marc import MARC
from longtail.report.figures import write_figures
from longtail.report.page import Context, page_data, write_page
from longtail.report.summary import Calibrated, Summary, scores, summarise, verdict
from longtail.runs.folder import Run, build_posthoc_for
from longtail.tasks.calibrate import views_for
from longtail.tasks.calibrate_run import calibrations_of
from longtail.tasks.calibration import CalibrationFile, read_calibration
from longtail.tasks.diagnose import read_diagnosis

OWN_FILES = PAGE_FILE, NUMBERS_FILE, FIGURES = "index.html", "report.json", "figures"
USED = "on the validation images that the method was fitted or chosen on: higher than on new images"


def report_run(
    runs: Sequence[Run], out: Path, *, root: str | None = None, workers: int = 0, display: Display = QUIET
) -> tuple[Path, Summary]:
    """Report on the first run and its calibrations; further runs show the effect of the stage-one data.

    A calibrated run is compared with the run that was calibrated. For a trained run, the newest calibration in its
    folder is shown, the others beside it; if there is none, the usual method is fitted.
    """
    require_free(out, OWN_FILES, "a report", overwrite=True)  # checked before minutes of work
    first, *rest = runs
    run = Run.open(first.calibration.run) if first.calibration else first
    split = run.scored_split
    if split is None:
        raise UserError(f"{run.folder} has neither a test nor a validation split; a report needs held-out images")
    run = run.using(root=root, workers=workers, display=display)
    held_out = run.outputs(split)
    validation = run.outputs("validation") if "validation" in run.split_sizes else None
    calibrated = stored_calibrations(first, run, held_out, validation, root)
    if not calibrated:
        name, why = default_posthoc(run.split_sizes.get("validation", 0), frozen=run.is_frozen)
        command = command_on("calibrate", run.folder, root, "--method", name, "--images-per-class", "all")
        display.line(f"not calibrated yet: fitting {POSTHOC_METHODS[name].title} for this report ({why})")
        method = build_posthoc_for(run, name, {})
        train = run.outputs("train", views=views_for(method, run, 1))
        calibrated = [fitted_here(name, method, train, held_out, validation, command)]
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
        command=shown.command,
        facts={
            "run": str(run.folder),
            "model": run.model_identity[:16],
            "calibration": shown.origin,
            **({"scores": shown.caution} if shown.caution else {}),
            "versions": ", ".join(f"{name} {value}" for name, value in run.record.versions.items()),
        },
        checkpoints=[
            checkpoint_row(other, run, split, root, workers, display) for other in ((run, *rest) if rest else ())
        ],
        read_image=lambda index: picture(images, index),
        caution=f"The scores are {shown.caution}." if shown.caution else "",
        diagnosis=diagnosis,
    )
    summary = summarise(held_out, validation, calibrated)
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
    """Report on saved logits, with the usual method fitted on them."""
    require_free(out, OWN_FILES, "a report", overwrite=True)
    train = read_outputs(source, label_column=label_column)
    held_out = read_held_out(test, "test", train, label_column)
    chosen_on = read_held_out(validation, "validation", train, label_column) if validation else None
    name, why = default_posthoc(0 if chosen_on is None else len(chosen_on))
    display.line(f"fitting {POSTHOC_METHODS[name].title} on {len(train):,} {train.split} images ({why})")
    files = [*(["--validation", str(validation)] if validation else []), "--test", str(test), "--out", "calibrated"]
    command = command_on("calibrate", source, None, *files)
    calibrated = fitted_here(name, build_posthoc(name, {}), train, held_out, chosen_on, command)
    facts = {"training logits": str(source), "test logits": str(test), "calibration": calibrated.origin}
    context = Context(f"{source.name}: {train.num_classes:,} classes", command, facts)
    summary = summarise(held_out, chosen_on, [calibrated])
    return write_report(summary, context, out, display), summary


def write_report(summary: Summary, context: Context, out: Path, display: Display) -> Path:
    """Write figures, page and their numbers to a folder, atomically; returns the page."""
    display.line("drawing")
    with replacing_folder(out, OWN_FILES, "a report") as folder:
        write_figures(summary, folder / FIGURES)
        numbers = page_data(summary, context)
        write_json(folder / NUMBERS_FILE, numbers)
        write_page(summary, context, folder / PAGE_FILE, numbers)
    display.line(verdict(summary))
    return out / PAGE_FILE


def fitted_here(
    name: str, method: PostHoc, train: Outputs, held_out: Outputs, validation: Outputs | None = None, command: str = ""
) -> Calibrated:
    """A method fitted for the report, for a model without a calibration."""
    fit_outputs(method, train, validation)
    title, seen = POSTHOC_METHODS[name].title, f"{len(train):,} {train.split} images ({_views(train.views)})"
    return Calibrated(
        title,
        np.asarray(method.transform(held_out)),
        getattr(method, "n_parameters_", None),
        origin=f"{title}, fitted for this report on {seen}",
        caution=USED if method.needs_validation and held_out.split == "validation" else "",
        method=name,
        validation=None if validation is None else np.asarray(method.transform(validation)),
        command=command,
    )


def stored_calibrations(
    first: Run, run: Run, held_out: Outputs, validation: Outputs | None, root: str | None = None
) -> list[Calibrated]:
    """The calibrations of a run in its folder, each once: that of `first` if it is one, then the newest."""
    folders = dict.fromkeys([*([first.folder] if first.calibration else []), *calibrations_of(run)])
    calibrations: dict[Path, Calibrated] = {}
    for folder in folders:
        one = read_stored(folder, run, held_out, validation, root)
        if not any(
            one.method == other.method and np.allclose(one.logits, other.logits) for other in calibrations.values()
        ):
            calibrations[folder] = one
    titles = Counter(one.title for one in calibrations.values())
    return [
        replace(one, title=f"{one.title} ({folder.name})") if titles[one.title] > 1 else one
        for folder, one in calibrations.items()
    ]


def read_stored(
    folder: Path, run: Run, held_out: Outputs, validation: Outputs | None = None, root: str | None = None
) -> Calibrated:
    """The calibration in a folder: its head, applied to the held-out features."""
    calibrated = Run.open(folder)
    described, numbers = read_calibration(folder, model=calibrated.model_identity)
    head = saved_head(calibrated.model())

    def logits(outputs: Outputs) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(head(torch.from_numpy(np.array(outputs.features)).float()))

    chosen = ", ".join(f"{name} {value:g}" for name, value in described.chosen.items() if name != "strength")
    where, settings = described.fitted_on, f" ({chosen})" if chosen else ""
    title = described.title
    strength = described.chosen.get("strength", 1.0)
    if "strength" in described.chosen:
        title = f"{title.replace(' + limit', '')} at strength {strength:g}"
    used = held_out.split == "validation" and where.used_validation
    return Calibrated(
        title,
        logits(held_out),
        described.parameters,
        origin=f"{title}{settings} in {folder}, fitted on {where.in_words()} ({_views(where.views)})",
        caution=USED if used else "",
        method=described.method,
        strength=strength,
        validation=None if validation is None else logits(validation),
        command=command_of(run, folder, described, root),
        costs=None if numbers.get("costs_") is None else read_costs(numbers["costs_"], run.class_names),
    )


def command_of(run: Run, folder: Path, described: CalibrationFile, root: str | None) -> str:
    """The command that makes a calibration; empty for a method that is not in `longtail methods`."""
    if described.method not in POSTHOC_METHODS:
        return ""
    settings, costs = described.settings, described.settings.get("costs")
    while isinstance(settings.get("method"), dict):  # of a method inside another
        settings = settings["method"]
    usual = build_posthoc_for(run, described.method, {}).get_params(deep=False)
    words = ["--method", described.method]
    other = {name: value for name, value in settings.items() if name in usual and value != usual[name]}
    if other := {name: value for name, value in other.items() if isinstance(value, str | int | float)}:
        words += ["--options", *(str(word) for item in other.items() for word in item)]
    words += ["--then", "temperature"] if "temperature" in described.chosen else []
    words += ["--costs", costs] if isinstance(costs, str) else []
    where = described.fitted_on
    if where.seen:
        words += ["--images-per-class", str(where.images_per_class or "all")]
        words += ["--views", str(where.views)] if where.views != 1 else []
    return command_on("calibrate", run.folder, root, *words, "--out", str(folder), "--overwrite")


def _views(views: int) -> str:
    """How often a method has seen each image, in words."""
    return f"{views} augmented {'view' if views == 1 else 'views'} of each" if views else "clean images"


def title_of(run: Run) -> str:
    """Data set, number of classes and network in words."""
    config = run.config
    # The factor is part of the name of CIFAR's long tails; that of others is seen in the plot.
    factor = f" {config.imbalance:g}" if config.data.startswith("cifar") else ""
    tail = f"-LT{factor}" if config.profile != "none" else ""
    name = Path(run.data_name).name.replace("cifar", "CIFAR-")
    return f"{name}{tail}: {len(run.class_names):,} classes, network {config.backbone}"


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
