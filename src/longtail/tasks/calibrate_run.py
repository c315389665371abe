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
from longtail.files.records import FORMAT
from longtail.heads.fold import head_of, with_head
from longtail.heads.kinds import SAVED_HEADS
from longtail.methods import PostHocMethod, describe_posthoc
from longtail.outputs.record import Outputs
from longtail.posthoc.base import PostHoc
from longtail.posthoc.inputs import chosen_images
from longtail.runs.folder import Run, write_model
from longtail.runs.record import MODEL_FILE, RUN_FILE, CalibrationRecord
from longtail.tasks.calibrate import fit_method, is_folded, views_for
from longtail.tasks.calibration import (
    CALIBRATED,
    KIND,
    OWN_FILES,
    Comparison,
    FittedOn,
    compare_outputs,
    write_calibration,
    write_head,
)

VERIFIED = 256  # samples on which the logits of the new head are compared with those of the method


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
    subsample = chosen_images(images_per_class, method, run.class_counts, seed)
    if method.needs_validation and "validation" not in run.split_sizes:
        raise UserError(
            f"{described.title} needs images that the network has not seen, but {run.folder} has no validation images; "
            "train with --validation 0.1, or with --validation 0.02 --validation-from head, which keeps all tail images"
        )
    held_out = {split: run.outputs(split) for split in run.split_sizes if split != "train"}
    train = None
    if not method.fitted_on_unseen:
        if subsample:
            number, kind = (
                np.minimum(run.class_counts, subsample.most).sum(),
                "image" if subsample.most == 1 else "images",
            )
            run.display.line(
                f"fitting on at most {subsample.most} {kind} per class: {number:,} of {run.class_counts.sum():,} "
                "(--images-per-class all for all of them)"
            )
        train = run.outputs("train", views=views, images_per_class=subsample.most if subsample else "all", seed=seed)
    fit_method(method, train, held_out.get("validation"), run.world, frozen=run.is_frozen)
    return folder, _write(folder, method, described, name, train, held_out, run.world, run)


def calibrate_files(
    train: Outputs,
    method: PostHoc,
    out: Path,
    held_out: dict[str, Outputs],
    *,
    name: str | None = None,
    world: World = SINGLE_PROCESS,
    overwrite: bool = False,
) -> list[Comparison]:
    """Fit a method on saved logits; writes its numbers, scores, calibrated logits and, if it is known, the head."""
    method.check_settings()
    require_free(out, OWN_FILES, KIND, overwrite=overwrite)
    fit_method(method, train, held_out.get("validation"), world)
    return _write(out, method, *describe_posthoc(method, name), train, held_out, world, None)


def _write(
    out: Path,
    method: PostHoc,
    described: PostHocMethod,
    name: str,
    train: Outputs | None,
    held_out: dict[str, Outputs],
    world: World,
    run: Run | None,
) -> list[Comparison]:
    """Write the folder of a fitted method, for a run or for saved logits; returns the scores before and after."""
    scores: list[Comparison] = []
    if world.is_main:
        validation, frozen = held_out.get("validation"), method.for_frozen if run is None else run.is_frozen
        fitted_on = validation if method.fitted_on_unseen else train
        assert fitted_on is not None
        used = [fitted_on, *([validation] if validation is not None and method.needs_validation else [])]
        with replacing_folder(out, OWN_FILES, KIND) as folder:
            identity = None if run is None else _write_network(folder, run, method, name, described.title, fitted_on)
            if run is None and train is not None:
                write_head(folder, method, train)
            for split, outputs in held_out.items():
                calibrated = np.asarray(method.transform(outputs))
                scores.append(compare_outputs(outputs, calibrated, used))
                values = {"format": FORMAT, "model": identity, **scores[-1].to_dict()}
                write_json(folder / f"before-after-{split}.json", values)
                if run is None:
                    kept = {"split": split, "class_names": outputs.class_names, "group_counts": outputs.group_counts}
                    written = Outputs(outputs.labels, outputs.class_counts, calibrated, **kept)  # type: ignore[arg-type]
                    written.save(folder / f"{split}{CALIBRATED}")
            origin = FittedOn.of(fitted_on, validation if method.needs_validation else None, frozen=frozen)
            write_calibration(folder, method, described, name, origin, identity, fitted_on.class_names)
    world.barrier()
    return scores


def _write_network(folder: Path, run: Run, method: PostHoc, name: str, title: str, outputs: Outputs) -> str:
    """Write the calibrated network and its `run.json`; returns its identity. Samples of `outputs` verify its head."""
    old = head_of(run.network)
    head = method.head(old)
    kind = type(head).__name__
    if kind not in SAVED_HEADS:
        raise UserError(
            f"a run folder cannot store the head of {type(method).__name__}, a {kind}; fold it into a linear layer "
            "(PostHoc.fold), or use longtail.calibrate and save the model yourself"
        )
    features = torch.from_numpy(np.array(outputs.features[:VERIFIED])).float()  # type: ignore[index]  # a run has them
    with torch.no_grad():
        before, after = old(features), head(features)
    if not is_folded(after, method.transform(before, features), before):
        raise UserError(
            f"{type(method).__name__} cannot be folded into the head of {run.folder}: the new network would not give "
            "the logits of the method"
        )
    calibrated = with_head(run.network, head)
    identity = write_model(folder / MODEL_FILE, calibrated, run.record, {"calibrated_from": run.model_identity})
    origin = CalibrationRecord(name, title, kind, str(run.folder), run.model_identity)
    write_json(folder / RUN_FILE, replace(run.record, calibration=origin, model=identity).to_dict())
    return identity


def calibrations_of(run: Run) -> list[Path]:
    """Folders below a run that hold calibrations of its model, the newest first."""
    runs = [Run.open(path.parent) for path in run.folder.glob(f"*/{RUN_FILE}")]
    folders = [one.folder for one in runs if one.calibration and one.calibration.model == run.model_identity]
    return sorted(folders, key=lambda folder: (folder / RUN_FILE).stat().st_mtime_ns, reverse=True)
