"""Scores a frozen network on a split; the result does not depend on the number of processes."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from longtail.backbones.folding import folded
from longtail.backbones.inference import BATCH
from longtail.core.progress import QUIET, Display
from longtail.data.augment import Transform
from longtail.data.images import Images
from longtail.data.loading import in_order, load
from longtail.distributed.world import World
from longtail.errors import UserError
from longtail.metrics.confidence import Predictions
from longtail.metrics.scores import Metrics, score_predictions


def score(
    model: nn.Module,
    images: Images,
    transform: Transform,
    world: World,
    group_counts: np.ndarray,
    *,
    workers: int = 0,
    display: Display = QUIET,
) -> Metrics:
    """The scores of a network on images; `group_counts` (K,) defines many-, medium- and few-shot classes.

    The processes of `world` take whole batches in turn, so that the result does not depend on their
    number; they exchange five numbers per image. Images that were skipped
    as broken are left out.
    """
    plan = in_order(len(images), BATCH, rank=world.rank, world_size=world.size)
    labels, found = images.labels.numpy(), []
    network = folded(model)
    with torch.no_grad(), (display if world.is_main else QUIET).task("evaluating", len(images)) as task:
        for batch in load(images, transform, plan, workers=workers, device=world.device):
            places = batch.indices.numpy()
            logits = network(batch.images).float().cpu().numpy()
            found.append((places, Predictions.of(logits, labels[places], int(places[0]))))
            task.advance(len(places) * world.size)
    return collect(found, labels, group_counts, world)


def collect(
    found: list[tuple[np.ndarray, Predictions]], labels: np.ndarray, group_counts: np.ndarray, world: World
) -> Metrics:
    """Join the parts (places, predictions) of all processes; each sample is counted once."""
    parts = [part for of_process in world.gather(found) for part in of_process]
    if not parts:
        raise UserError("there are no samples to evaluate on")
    places = np.concatenate([part[0] for part in parts])
    order, first = np.unique(places, return_index=True)
    return score_predictions(Predictions.joined([part[1] for part in parts]).take(first), labels[order], group_counts)
