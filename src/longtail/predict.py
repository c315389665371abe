"""Running a frozen network over a split, alone or shared among processes, with one and the same result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from longtail.backbones.folding import folded
from longtail.data.augment import Transform
from longtail.data.images import Images
from longtail.data.loading import in_order, load
from longtail.display import Display
from longtail.world import World

BATCH = 64  # with more, activations outgrow what the allocator keeps, and every layer faults its pages in again


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients (batch-norm statistics fixed), then every part back to its mode before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():  # what a model keeps for itself in inference mode could never be trained with
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def predict(
    model: nn.Module,
    images: Images,
    transform: Transform,
    world: World,
    *,
    workers: int = 0,
    display: Display | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Logits (N, K) float32 and labels (N,) of every image, in the order of the set.

    The processes of `world` take whole batches in turn, so that the result does not depend on their
    number. Images that were skipped as broken are left out.
    """
    plan = in_order(len(images), BATCH, rank=world.rank, world_size=world.size)
    display = display if display and world.is_main else Display(quiet=True)
    logits: list[Tensor] = []
    indices = [torch.zeros(0, dtype=torch.int64)]  # where batches are fewer than processes, some have none
    network = folded(model)
    with torch.no_grad(), display.task("evaluating", len(images)) as task:
        for batch in load(images, transform, plan, workers=workers, device=world.device):
            logits.append(network(batch.images).float().cpu())
            indices.append(batch.indices)
            task.advance(len(batch.indices) * world.size)
    own = torch.cat(logits).numpy() if logits else None
    return collect(own, torch.cat(indices).numpy(), images, world)


def collect(
    logits: np.ndarray | None, indices: np.ndarray, images: Images, world: World
) -> tuple[np.ndarray, np.ndarray]:
    """Put the parts of all processes together by sample index, each sample once."""
    parts = world.gather((logits, indices))
    everywhere = np.concatenate([part for _, part in parts])
    values = np.concatenate([part for part, _ in parts if part is not None])
    order, first = np.unique(everywhere, return_index=True)
    return values[first], images.labels.numpy()[order]
