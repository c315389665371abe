"""Calibrates a run; the calibrated network is written to a new run folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from longtail.core.files import replacing_folder, write_json
from longtail.core.opening import resolved
from longtail.errors import UserError
from longtail.extraction.run import Extractor
from longtail.methods import PostHocMethod, describe_posthoc
from longtail.networks.head import guess_head, head_of, with_head
from longtail.networks.saved_heads import SAVED_HEADS
from longtail.posthoc.base import PostHoc
from longtail.posthoc.fitting import chosen_images, fit_outputs, warn_if_all_is_known
from longtail.runs.folder import MODEL_FILE, RUN_FILE, Run, write_model
from longtail.runs.record import CalibrationRecord
from longtail.tasks.calibration import (
    KIND,
    OWN_FILES,
    Comparison,
    FittedOn,
    compare_outputs,
    require_free,
    write_calibration,
    write_scores,
)


def calibrate_run(
    extractor: Extractor,
    method: PostHoc,
    name: str | None = None,
    *,
    out: Path | None = None,
    views: int = 1,
    images_per_class: int | str = "auto",
    seed: int = 0,
    overwrite: bool = False,
) -> tuple[Path, list[Comparison]]:
    """Fit a method on a run's own images and write the calibrated model.

    Outputs are computed once and kept in the run's folder. Returns the new folder (default: RUN/METHOD) and the
    scores on the held-out splits.

    Args:
        extractor: the run, and how its images are read.
        method: the method to fit.
        name: name of the method (default: its name in `longtail methods`, or that of its class).
        out: folder to write.
        views: augmented passes over the training images; 0 for clean images.
        images_per_class: at most so many training images of every class are used; "all", or "auto" for as many as the
            method needs.
        seed: random seed that selects these images.
        overwrite: replace an existing calibration.
    """
    run, world = extractor.run, extractor.world
    known, name = describe_posthoc(method, name)
    folder = out or run.folder / name
    if resolved(folder) == resolved(run.folder):
        raise UserError(f"{folder} is the run itself; choose another --out")
    require_free(folder, overwrite=overwrite)
    method.check_settings()
    few = chosen_images(images_per_class, method, run.class_counts, seed)
    if method.needs_validation and "validation" not in run.split_sizes:
        raise UserError(
            f"{known.title} needs images that the network has not seen, but {run.folder} has no validation images; "
            "train with --validation 0.1, or with --validation 0.02 --validation-from head, which keeps all tail images"
        )
    held_out = {split: extractor.outputs(split) for split in ("validation", "test") if split in run.split_sizes}
    validation = held_out.get("validation")
    if few and not method.fitted_on_unseen:
        taken, kind = np.minimum(run.class_counts, few.most).sum(), "image" if few.most == 1 else "images"
        extractor.display.line(
            f"fitting on at most {few.most} {kind} per class: {taken:,} of {run.class_counts.sum():,} "
            "(--images-per-class all for all of them)"
        )
    train = None if method.fitted_on_unseen else extractor.outputs("train", views=views, few=few)
    fit_outputs(method, train, validation, world)
    if world.is_main:
        warn_if_all_is_known(method, train)
    scores: list[Comparison] = []
    if world.is_main:
        scores = [
            compare_outputs(outputs, np.asarray(method.transform(outputs)), method) for outputs in held_out.values()
        ]
        outputs = train or validation
        assert outputs is not None
        fitted_on = FittedOn.of(outputs, validation if method.needs_validation else None)
        with replacing_folder(folder, OWN_FILES, KIND) as temporary:
            _write(temporary, extractor, method, known, name, fitted_on, scores)
    world.barrier()
    return folder, scores


def _write(
    folder: Path,
    extractor: Extractor,
    method: PostHoc,
    known: PostHocMethod,
    name: str,
    fitted_on: FittedOn,
    scores: list[Comparison],
) -> None:
    run, model = extractor.run, extractor.model.cpu()
    calibrated = with_head(model, method.head(head_of(model)))
    kind = type(calibrated.get_submodule(guess_head(model))).__name__
    if kind not in SAVED_HEADS:
        raise UserError(
            f"a run folder cannot store the head of {type(method).__name__}, a {kind}; fold it into a linear layer "
            "(PostHoc.fold), or use longtail.calibrate and save the model yourself"
        )
    identity = write_model(folder / MODEL_FILE, calibrated, {"calibrated_from": run.model_identity})
    write_calibration(folder, method, known, name, fitted_on, identity, run.class_names)
    write_scores(folder, scores, identity)
    origin = CalibrationRecord(name, known.title, kind, str(run.folder), run.model_identity)
    write_json(folder / RUN_FILE, replace(run.record, calibration=origin).to_dict())


def calibrations_of(run: Run) -> list[Path]:
    """Folders below a run that hold calibrations of its model, the newest first."""
    found = []
    for path in run.folder.glob(f"*/{RUN_FILE}"):
        origin = Run.open(path.parent).calibration
        if origin and origin.model == run.model_identity:
            found.append(path.parent)
    return sorted(found, key=lambda folder: (folder / RUN_FILE).stat().st_mtime_ns, reverse=True)
