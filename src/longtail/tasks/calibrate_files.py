"""Calibrates saved logits, without their network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from longtail.distributed import SINGLE_PROCESS, World
from longtail.files.atomic import replacing_folder
from longtail.files.tensors import write_tensors
from longtail.heads.layers import linear_layer
from longtail.methods import describe_posthoc
from longtail.outputs.record import Outputs
from longtail.posthoc.base import PostHoc
from longtail.tasks.calibrate import fit_method
from longtail.tasks.calibration import (
    CALIBRATED,
    HEAD_FILE,
    KIND,
    OWN_FILES,
    Comparison,
    FittedOn,
    compare_outputs,
    require_free,
    write_calibration,
    write_scores,
)


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
    require_free(out, overwrite=overwrite)
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
        origin = FittedOn.of(fitted_on, validation if method.needs_validation else None)
        write_calibration(folder, method, described, name, origin, None, fitted_on.class_names)
    return scores
