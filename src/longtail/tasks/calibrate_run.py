"""Calibrates a run: the outputs of its network, a fit, and a new run folder with the calibrated network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from longtail.errors import UserError
from longtail.files.atomic import replacing_folder, write_json
from longtail.files.reading import resolved
from longtail.heads.kinds import SAVED_HEADS
from longtail.heads.layers import guess_head, head_of, with_head
from longtail.methods import describe_posthoc
from longtail.posthoc.base import PostHoc
from longtail.posthoc.inputs import chosen_images
from longtail.runs.folder import MODEL_FILE, RUN_FILE, Run, write_model
from longtail.runs.record import CalibrationRecord
from longtail.tasks.calibrate import fit_method
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
    run: Run,
    method: PostHoc,
    name: str | None = None,
    *,
    out: Path | None = None,
    views: int = 1,
    images_per_class: int | str = "auto",
    seed: int = 0,
    overwrite: bool = False,
) -> tuple[Path, list[Comparison]]:
    """Fit a method on a run's training images and write the calibrated model.

    Outputs are computed once and kept in the run's folder. Returns the new folder (default: RUN/METHOD) and the
    scores on the held-out splits.

    Args:
        run: the run, and how its images are read (`Run.using`).
        method: the method to fit.
        name: name of the method (default: its name in `longtail methods`, or that of its class).
        out: folder to write.
        views: augmented passes over the training images; 0 for clean images.
        images_per_class: at most so many training images of every class are used; "all", or "auto" for as many as the
            method needs.
        seed: random seed that selects these images.
        overwrite: replace an existing calibration.
    """
    described, name = describe_posthoc(method, name)
    folder = out or run.folder / name
    if resolved(folder) == resolved(run.folder):
        raise UserError(f"{folder} is the run itself; choose another --out")
    require_free(folder, overwrite=overwrite)
    method.check_settings()
    few = chosen_images(images_per_class, method, run.class_counts, seed)
    if method.needs_validation and "validation" not in run.split_sizes:
        raise UserError(
            f"{described.title} needs images that the network has not seen, but {run.folder} has no validation images; "
            "train with --validation 0.1, or with --validation 0.02 --validation-from head, which keeps all tail images"
        )
    held_out = {split: run.outputs(split) for split in ("validation", "test") if split in run.split_sizes}
    train, validation = None, held_out.get("validation")
    if not method.fitted_on_unseen:
        if few:
            taken, kind = np.minimum(run.class_counts, few.most).sum(), "image" if few.most == 1 else "images"
            run.display.line(
                f"fitting on at most {few.most} {kind} per class: {taken:,} of {run.class_counts.sum():,} "
                "(--images-per-class all for all of them)"
            )
        train = run.outputs("train", views=views, images_per_class=few.most if few else "all", seed=seed)
    fit_method(method, train, validation, run.world)
    scores: list[Comparison] = []
    if run.world.is_main:
        scores = [
            compare_outputs(outputs, np.asarray(method.transform(outputs)), method) for outputs in held_out.values()
        ]
        fitted_on = train or validation
        assert fitted_on is not None
        with replacing_folder(folder, OWN_FILES, KIND) as temporary:
            identity = _write_network(temporary, run, method, name, described.title)
            origin = FittedOn.of(fitted_on, validation if method.needs_validation else None)
            write_calibration(temporary, method, described, name, origin, identity, run.class_names)
            write_scores(temporary, scores, identity)
    run.world.barrier()
    return folder, scores


def _write_network(folder: Path, run: Run, method: PostHoc, name: str, title: str) -> str:
    """Write the calibrated network and its `run.json`; returns its identity."""
    model = run.network
    calibrated = with_head(model, method.head(head_of(model)))
    kind = type(calibrated.get_submodule(guess_head(model))).__name__
    if kind not in SAVED_HEADS:
        raise UserError(
            f"a run folder cannot store the head of {type(method).__name__}, a {kind}; fold it into a linear layer "
            "(PostHoc.fold), or use longtail.calibrate and save the model yourself"
        )
    identity = write_model(folder / MODEL_FILE, calibrated, run.record, {"calibrated_from": run.model_identity})
    origin = CalibrationRecord(name, title, kind, str(run.folder), run.model_identity)
    write_json(folder / RUN_FILE, replace(run.record, calibration=origin, model=identity).to_dict())
    return identity


def calibrations_of(run: Run) -> list[Path]:
    """Folders below a run that hold calibrations of its model, the newest first."""
    folders = []
    for path in run.folder.glob(f"*/{RUN_FILE}"):
        origin = Run.open(path.parent).calibration
        if origin and origin.model == run.model_identity:
            folders.append(path.parent)
    return sorted(folders, key=lambda folder: (folder / RUN_FILE).stat().st_mtime_ns, reverse=True)
