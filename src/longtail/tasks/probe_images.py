"""Fits `Probe` on images: embeddings of a frozen backbone, computed once, and a run folder with the new head.

The embeddings are outputs of a run in the cache folder ($LONGTAIL_CACHE) whose backbone has the given weights: another
target prior, or another folder for the result, reads them again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtail.backbones import BACKBONES
from longtail.config import TrainConfig
from longtail.data.splits import Splits, image_side, open_splits
from longtail.distributed import World, join
from longtail.errors import UserError
from longtail.files.atomic import cache_folder, replacing_folder, require_free, write_json
from longtail.files.progress import Display
from longtail.heads.layers import fingerprint, head_of, with_head
from longtail.outputs.record import Outputs
from longtail.posthoc.probe.estimator import Probe
from longtail.posthoc.probe.inputs import log_target_prior, require_finite_rows
from longtail.runs.folder import Run, write_model
from longtail.runs.outputs import outputs_path
from longtail.runs.record import MODEL_FILE, RUN_FILE, RUN_FILES, RUN_FOLDERS, RunRecord
from longtail.tasks.probe import RECORD_FILE, ProbeScores, Samples, announce, record_of, score_probe
from longtail.training.loop import require_apart
from longtail.training.rehearsal import new_network, own_random_numbers

KIND = "a run"
OF_A_RUN = (*RUN_FILES, *RUN_FOLDERS)


def probe_images(
    config: TrainConfig, out: Path, *, target_prior: Any = "uniform", overwrite: bool = False, display: Display
) -> ProbeScores:
    """Fit on the training images of a configuration, with its backbone as it is; `out` becomes a run folder.

    Args:
        config: images, backbone and its weights; settings of training are not used.
        out: folder of the run; it appears whole, or not at all.
        target_prior: class frequencies to be right for, as in `Probe`.
        overwrite: replace a run in the folder.
        display: where progress is shown.
    """
    if config.weights is None and config.backbone in BACKBONES:
        raise UserError(f"--backbone {config.backbone} has random weights; give pretrained ones with --weights FILE")
    config = replace(config, train="head")
    require_free(out, OF_A_RUN, KIND, overwrite=overwrite)
    require_apart(out, config)
    image_side(config)  # or an error that says what is missing
    with join(config.device) as world, own_random_numbers(world.device):
        splits = open_splits(config)
        run = _frozen_run(config, splits, world).using(world, workers=config.workers, display=display)
        names, counts = run.class_names, run.class_counts
        with np.errstate(divide="ignore"):
            log_target_prior(target_prior, np.log(counts / counts.sum()), names)
        outputs = {split: run.outputs(split) for split in run.split_sizes}
        train = outputs["train"]
        assert train.features is not None
        for one in outputs.values():
            require_finite_rows(np.asarray(one.features))
        seen = np.bincount(train.labels, minlength=len(names))
        if (seen > 0).sum() < 2:
            raise UserError("the training images are of one class; a classifier needs two classes at least")
        fitted_on = Samples(f"{run.data_name}, train", train.features, train.labels)
        announce(fitted_on, seen, run.display)
        probe = Probe(target_prior)
        probe.fit_codes(train.features, train.labels, np.array(names), seen, names, world)
        held_out, test = None, outputs.get("test", outputs.get("validation"))
        if test is not None:
            held_out = Samples(f"{run.data_name}, {test.split}", np.asarray(test.features), test.labels)
        scores = ProbeScores(probe, None, None, "")
        if world.is_main:
            scores = score_probe(probe, fitted_on, held_out)
            with replacing_folder(out, OF_A_RUN, KIND) as folder:
                _write(folder, run, scores, outputs)
                write_json(folder / RECORD_FILE, record_of(scores, fitted_on, held_out))
        world.barrier()
    return scores


def _frozen_run(config: TrainConfig, splits: Splits, world: World) -> Run:
    """A run in the cache folder whose network is the backbone as it is and a head of zeros."""
    model, _ = new_network(config, splits)
    head = head_of(model)
    torch.nn.init.zeros_(head.weight)
    if head.bias is not None:
        torch.nn.init.zeros_(head.bias)
    record = RunRecord.of(config, splits, None)
    images = {name: split.digest for name, split in record.data.splits.items()}
    known = json.dumps([record.digest, fingerprint(model), images, config.root, config.train_list])
    folder = cache_folder() / "frozen" / hashlib.sha256(known.encode()).hexdigest()[:24]
    if world.is_main and not (folder / MODEL_FILE).is_file():
        with replacing_folder(folder, OF_A_RUN, KIND) as new:
            identity = write_model(new / MODEL_FILE, model, record, {})
            write_json(new / RUN_FILE, replace(record, model=identity).to_dict())
    world.barrier()
    return Run.open(folder)


def _write(folder: Path, run: Run, scores: ProbeScores, outputs: dict[str, Outputs]) -> None:
    """The run with the new head, and its outputs on held-out images."""
    head = scores.probe.to_linear()
    identity = write_model(folder / MODEL_FILE, with_head(run.network, head), run.record, {})
    write_json(folder / RUN_FILE, replace(run.record, model=identity).to_dict())
    weight, bias = (values.detach().numpy() for values in (head.weight, head.bias))
    new = Run(folder, run.record)
    for split, stored in outputs.items():
        if split != "train":
            path = outputs_path(new, split)
            path.parent.mkdir(exist_ok=True)
            known = {"head_weight": weight, "head_bias": bias, "logits": None, "model": identity}
            replace(stored, **known).save(path)  # type: ignore[arg-type]
