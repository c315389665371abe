"""Scoring a frozen network on a split, alone or shared among processes, with one and the same result."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from longtail.backbones.folding import folded
from longtail.backbones.inference import BATCH
from longtail.core.progress import Display
from longtail.data.augment import Transform
from longtail.data.images import Images
from longtail.data.loading import in_order, load
from longtail.distributed.world import World
from longtail.errors import UserError
from longtail.metrics.scores import Metrics, evaluate_predictions, predicted


def score(
    model: nn.Module,
    images: Images,
    transform: Transform,
    world: World,
    class_counts: np.ndarray,
    *,
    workers: int = 0,
    display: Display | None = None,
) -> Metrics:
    """The scores of a network on images, classes grouped by `class_counts` (K,).

    The processes of `world` take whole batches in turn, so that the result does not depend on their
    number; they exchange the best class of each image and its probability. Images that were skipped
    as broken are left out.
    """
    plan = in_order(len(images), BATCH, rank=world.rank, world_size=world.size)
    display = display if display and world.is_main else Display(quiet=True)
    found: list[tuple[np.ndarray, ...]] = []
    network = folded(model)
    with torch.no_grad(), display.task("evaluating", len(images)) as task:
        for batch in load(images, transform, plan, workers=workers, device=world.device):
            logits = network(batch.images).float().cpu().numpy()
            found.append((batch.indices.numpy(), *predicted(logits, int(batch.indices[0]))))
            task.advance(len(batch.indices) * world.size)
    return collect(found, images.labels.numpy(), class_counts, world)


def collect(found: list[tuple[np.ndarray, ...]], labels: np.ndarray, class_counts: np.ndarray, world: World) -> Metrics:
    """Put the parts of all processes, (places, classes, confidence), together, each sample once."""
    parts = [part for of_process in world.gather(found) for part in of_process]
    if not parts:
        raise UserError("there are no samples to evaluate on")
    everywhere, classes, confidence = (np.concatenate(values) for values in zip(*parts, strict=True))
    order, first = np.unique(everywhere, return_index=True)
    return evaluate_predictions(classes[first], labels[order], class_counts, confidence[first])
