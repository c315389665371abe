"""Calibrates a run, which gives a new run folder with the calibrated network, or saved logits without their network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from longtail.distributed import SINGLE_PROCESS, World
from longtail.errors import UserError
from longtail.files.atomic import replacing_folder, require_free, write_json
from longtail.files.reading import resolved
from longtail.files.tensors import write_tensors
from longtail.heads.kinds import SAVED_HEADS
from longtail.heads.layers import guess_head, head_of, linear_layer, with_head
from longtail.methods import describe_posthoc
from longtail.outputs.record import Outputs
from longtail.posthoc.base import PostHoc
from longtail.posthoc.gate import warn
from longtail.posthoc.inputs import TOO_SURE, chosen_images
from longtail.runs.folder import Run, write_model
from longtail.runs.record import MODEL_FILE, RUN_FILE, CalibrationRecord
from longtail.tasks.calibrate import fit_method
from longtail.tasks.calibration import (
    CALIBRATED,
    HEAD_FILE,
    KIND,
    OWN_FILES,
    Comparison,
    FittedOn,
    compare_outputs,
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
    require_free(folder, OWN_FILES, KIND, overwrite=overwrite)
    method.check_settings()
    views = views_for(method, run, views)
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
    frozen = run.config.train == "head"
    fit_method(method, train, validation, run.world, frozen=frozen)
    scores: list[Comparison] = []
    if run.world.is_main:
        scores = [
            compare_outputs(outputs, np.asarray(method.transform(outputs)), method) for outputs in held_out.values()
        ]
        fitted_on = train or validation
        assert fitted_on is not None
        with replacing_folder(folder, OWN_FILES, KIND) as temporary:
            identity = _write_network(temporary, run, method, name, described.title)
            origin = FittedOn.of(fitted_on, validation if method.needs_validation else None, frozen=frozen)
            write_calibration(temporary, method, described, name, origin, identity, run.class_names)
            write_scores(temporary, scores, identity)
    run.world.barrier()
    return folder, scores


def views_for(method: PostHoc, run: Run, views: int) -> int:
    """Augmented views of the training images to fit on; a method for frozen backbones takes the images as they are.

    Warns if such a method is to be fitted on images that the backbone was trained on.
    """
    if not method.for_frozen:
        return views
    if run.config.train != "head":
        warn(f"the network of {run.folder} was trained on these images, and {TOO_SURE}")
    return 0


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


def calibrate_files(
    train: Outputs,
    method: PostHoc,
    out: Path,
    held_out: list[Outputs],
    *,
    name: str | None = None,
    world: World = SINGLE_PROCESS,
    overwrite: bool = False,
) -> list[Comparison]:
    """Fit a method on saved logits; writes its numbers, the scores and the calibrated held-out logits.

    If the file has the head, the calibrated head is written too.
    """
    require_free(out, OWN_FILES, KIND, overwrite=overwrite)
    described, name = describe_posthoc(method, name)
    validation = next((outputs for outputs in held_out if outputs.split == "validation"), None)
    fit_method(method, train, validation, world)
    if not world.is_main:
        return []
    fitted_on = validation if method.fitted_on_unseen else train
    assert fitted_on is not None
    scores = []
    with replacing_folder(out, OWN_FILES, KIND) as folder:
        for outputs in held_out:
            calibrated = np.asarray(method.transform(outputs))
            scores.append(compare_outputs(outputs, calibrated, method))
            kept = {"split": outputs.split, "class_names": outputs.class_names, "group_counts": outputs.group_counts}
            written = Outputs(outputs.labels, outputs.class_counts, logits=calibrated, **kept)  # type: ignore[arg-type]
            written.save(folder / f"{outputs.split}{CALIBRATED}")
        if train.head_weight is not None:
            bias = None if train.head_bias is None else torch.from_numpy(train.head_bias).float()
            head = method.head(linear_layer(torch.from_numpy(train.head_weight).float(), bias))
            write_tensors(folder / HEAD_FILE, head.state_dict(), {"head": type(head).__name__})
        write_scores(folder, scores, None)
        held_out_of = validation if method.needs_validation else None
        origin = FittedOn.of(fitted_on, held_out_of, frozen=method.for_frozen)  # the user says so by the method
        write_calibration(folder, method, described, name, origin, None, fitted_on.class_names)
    return scores
