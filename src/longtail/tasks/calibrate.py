"""Repairing a trained classifier: any model with its loader, a run of ours, or saved logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from longtail.backbones.inference import evaluating
from longtail.core.files import write_json
from longtail.core.progress import Display
from longtail.core.tensors import write_tensors
from longtail.distributed.world import World
from longtail.errors import UserError
from longtail.extraction.model import extract, extract_with_head
from longtail.extraction.run import run_outputs
from longtail.metrics.scores import Metrics, evaluate_chunks, evaluate_logits
from longtail.networks.head import find_head, head_of, linear_layer, unwrap, with_head
from longtail.outputs.record import Outputs
from longtail.outputs.writer import Rows
from longtail.posthoc.base import AffinePostHoc, PostHoc
from longtail.posthoc.marc import MARC
from longtail.runs.folder import MODEL_FILE, RUN_FILE, Run

CALIBRATION_FILE = "calibration.json"
HEAD_FILE = "head.safetensors"
REPAIRED = "-calibrated.safetensors"


def calibrate(
    model: nn.Module,
    loader: Any,
    method: PostHoc | None = None,
    *,
    validation: Any = None,
    head: str | None = None,
    class_counts: Any = None,
    device: str = "auto",
) -> tuple[nn.Module, PostHoc]:
    """Repair a trained model: (a new model of the same class, the fitted method).

    Wrappers (DistributedDataParallel, DataParallel, torch.compile) are taken off the new model.

    Args:
        model: a classifier whose last layer is an `nn.Linear`; it is left as it is.
        loader: batches of its training set, as `extract` takes them; augmented as in training if you can.
        method: what to fit (default: `MARC()`).
        validation: batches of held-out images, for settings chosen on them.
        head: name of the last linear layer; without, it is the one whose output the model answers with.
        class_counts: (K,) training samples per class, if the loader does not show all of them.
        device: where to run the model.
    """
    method = MARC() if method is None else method
    rows = Rows(np.dtype(np.float32))
    train, head = extract_with_head(model, loader, rows, head=head, class_counts=class_counts, device=device)
    held_out = None
    if validation is not None:
        counts = train.class_counts
        held_out = extract(model, validation, head=head, class_counts=counts, split="validation", device=device)
    method.fit(train, validation=held_out)
    with evaluating(unwrap(model)):  # where reading a weight computes it, that must not change it
        repaired = method.head(head_of(model, head))
    return with_head(model, repaired, head), method


@dataclass(frozen=True)
class Comparison:
    """Scores of one split before and after."""

    split: str
    before: Metrics
    after: Metrics


def compare_outputs(outputs: Outputs, repaired: np.ndarray) -> Comparison:
    """Score outputs as they are and repaired, (N, K)."""
    stored = (chunk.numpy() for _, chunk in outputs.rows().chunks())
    before = evaluate_chunks(stored, outputs.labels, outputs.class_counts)
    return Comparison(outputs.split, before, evaluate_logits(repaired, outputs.labels, outputs.class_counts))


def calibrate_run(
    run: Run,
    method: PostHoc,
    name: str,
    world: World,
    *,
    out: Path | None = None,
    views: int = 1,
    root: str | None = None,
    workers: int = 0,
    overwrite: bool = False,
    display: Display | None = None,
) -> tuple[Path, list[Comparison]]:
    """Fit a method on a run's own training images; the repaired model becomes a run folder of its own.

    Outputs are computed once and kept in the run's folder. Returns the new folder and the scores on
    the held-out splits.
    """
    folder = out or run.folder / name
    if folder.resolve() == run.folder.resolve():
        raise UserError(f"{folder} is the run itself; choose another --out")
    if (folder / RUN_FILE).exists() and not overwrite:
        raise UserError(f"{folder} exists already; choose another --out or replace it with --overwrite")
    options: dict[str, Any] = {"root": root, "workers": workers, "display": display}
    train = run_outputs(run, "train", world, views=views, **options)
    held_out = {
        split: run_outputs(run, split, world, **options)
        for split in ("validation", "test")
        if split in run.details["data"]["images"]
    }
    method.fit(train, validation=held_out.get("validation"))
    scores = []
    if world.is_main:
        scores = [compare_outputs(outputs, np.asarray(method.transform(outputs))) for outputs in held_out.values()]
        _write_model(run, method, folder, describe(method, name, train))
        _remove_others(folder, write_scores(folder, scores))
    world.barrier()
    return folder, scores


def describe(method: PostHoc, name: str, train: Outputs) -> dict[str, Any]:
    """What was fitted, for people with another framework: the numbers and the formula."""
    fitted = {key: value for key, value in vars(method).items() if key.endswith("_") and not key.startswith("_")}
    numbers = {key: _plain(value) for key, value in fitted.items() if key not in ("result_", "classes_")}
    described: dict[str, Any] = {
        "method": name,
        "settings": method.get_params(),
        "fitted_on": {"split": train.split, "views": train.views, "samples": len(train), "model": train.model},
        "result": vars(method.result_),
        "class_names": list(train.class_names),
        **numbers,
    }
    if isinstance(method, AffinePostHoc):
        described["formula"] = "new_logit[j] = scale_[j] * logit[j] + shift_[j]"
    return described


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim <= 1 else f"array of shape {value.shape}, see the weights"
    return value.item() if isinstance(value, np.generic) else value


def _write_model(run: Run, method: PostHoc, folder: Path, description: dict[str, Any]) -> None:
    """The repaired network and its description, as a run folder."""
    model = run.load_model()
    repaired = with_head(model, method.head(head_of(model)))
    write_tensors(folder / MODEL_FILE, repaired.state_dict(), {"calibrated_from": description["fitted_on"]["model"]})
    write_json(folder / CALIBRATION_FILE, description)
    origin = {
        "method": description["method"],
        "head": type(repaired.get_submodule(find_head(model))).__name__,
        "from": str(run.folder),
    }
    # Last, because a folder counts as a run when this file is there.
    write_json(folder / RUN_FILE, {**run.details, "calibration": origin})


def write_scores(folder: Path, scores: list[Comparison]) -> list[Path]:
    """Scores before and after, one file per split."""
    written = []
    for score in scores:
        values = {"split": score.split, "before": score.before.to_dict(), "after": score.after.to_dict()}
        written.append(write_json(folder / f"before-after-{score.split}.json", values))
    return written


def _remove_others(folder: Path, written: list[Path]) -> None:
    """What a calibration that is replaced has left besides the files written now: it may have had other splits."""
    for pattern in ("before-after-*.json", f"*{REPAIRED}", HEAD_FILE):
        for path in {*folder.glob(pattern)} - {*written}:
            path.unlink()


def calibrate_files(
    train: Outputs, method: PostHoc, name: str, out: Path, held_out: list[Outputs], *, overwrite: bool = False
) -> list[Comparison]:
    """Fit a method on saved logits; writes its numbers, the scores and the repaired held-out logits.

    Where the head is known, the repaired one is written too.
    """
    if (out / CALIBRATION_FILE).exists() and not overwrite:
        raise UserError(f"{out} holds a calibration already; choose another --out or replace it with --overwrite")
    validation = next((outputs for outputs in held_out if outputs.split == "validation"), None)
    method.fit(train, validation=validation)
    if not train.world.is_main:
        return []
    out.mkdir(parents=True, exist_ok=True)
    scores, written = [], []
    for outputs in held_out:
        repaired = np.asarray(method.transform(outputs))
        scores.append(compare_outputs(outputs, repaired))
        written.append(out / f"{outputs.split}{REPAIRED}")
        Outputs(outputs.labels, outputs.class_counts, logits=repaired, split=outputs.split).save(written[-1])
    if train.head_weight is not None:
        bias = None if train.head_bias is None else torch.from_numpy(train.head_bias).float()
        head = method.head(linear_layer(torch.from_numpy(train.head_weight).float(), bias))
        written.append(out / HEAD_FILE)
        write_tensors(written[-1], head.state_dict(), {"head": type(head).__name__})
    _remove_others(out, [*written, *write_scores(out, scores)])
    write_json(out / CALIBRATION_FILE, describe(method, name, train))
    return scores
