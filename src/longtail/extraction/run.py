"""The outputs of a run: computed once per split, kept in the folder of the run."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from longtail.backbones.folding import folded
from longtail.backbones.inference import BATCH
from longtail.core.locks import locked
from longtail.core.opening import resolved
from longtail.core.progress import QUIET, Display
from longtail.data.augment import Transform
from longtail.data.images import Images
from longtail.data.imbalance import Few
from longtail.data.loading import in_order, load, resident
from longtail.data.splits import Splits
from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.errors import UserError, whole_number
from longtail.extraction.own_head import head_arrays, run_batch, watching_head
from longtail.networks.head import head_of
from longtail.outputs.record import Outputs, header
from longtail.outputs.writer import RowWriter, has_parts, join_parts, remove_parts
from longtail.runs.folder import Run

MANY_LOGITS = 1 << 28  # 1 GB in float32


class Extractor:
    """Runs the network of a finished run over images; network and images are opened once, when they are needed.

    Args:
        run: whose network.
        world: processes that share the images, batch by batch; the file is the same for any number of them.
        data_run: whose images, if they are not the run's own.
        root: folder of the data set, if it has moved since training.
        workers: processes that decode images read from files.
        display: where progress is shown.
    """

    def __init__(
        self,
        run: Run,
        world: World = SINGLE_PROCESS,
        *,
        data_run: Run | None = None,
        root: str | None = None,
        workers: int = 0,
        display: Display = QUIET,
    ) -> None:
        self.run = run
        self.world = world
        self.data_run = data_run or run
        self.root = root
        self.workers = workers
        self.display = display if world.is_main else QUIET

    @cached_property
    def splits(self) -> Splits:
        return self.data_run.splits(self.root)

    @cached_property
    def model(self) -> nn.Module:
        """The network on the device of this process."""
        return self.run.load_model().to(self.world.device)

    def path(self, split: str, views: int = 0, few: Few | None = None) -> Path:
        """The file of the outputs on a split, in the folder of the run."""
        name = f"{split}-views{views}" if views else split
        if few:
            name += f"-{few.most}-per-class-seed{few.seed}"
        if resolved(self.data_run.folder) != resolved(self.run.folder):
            name += f"-of-{self.data_run.data_hash()[:16]}"
        return self.run.folder / "outputs" / f"{name}.safetensors"

    def outputs(self, split: str, *, views: int = 0, few: Few | None = None) -> Outputs:
        """The outputs on a split: those on disk if they belong to these weights and images, otherwise new ones."""
        path, images = self.path(split, views, few), self.data_run.images(split, self.splits)
        known = self._known(path, images.digest, few)
        if known is None:
            # Cells of a comparison share a run: one computes its outputs, the others wait for them.
            with locked(path) if self.world.is_main else nullcontext():
                known = self._known(path, images.digest, few)
                if known is None:
                    if path.is_file():
                        self.display.line(f"{path} is of other weights or other images: computing it again")
                    self._write(split, path, views=views, few=few)
        return known or Outputs.open(path, model=self.run.model_identity)

    def _known(self, path: Path, digest: str, few: Few | None) -> Outputs | None:
        """The outputs on disk, if any; the result of rank 0 applies to all processes."""
        found = _open_known(path, self.run.model_identity, digest, few) if self.world.is_main else None
        if found and has_parts(path):  # processes that were killed when the file was whole have left them
            with suppress(UserError), locked(path, patience=0):
                remove_parts(path, self.world)
        if not self.world.gather(found is not None)[0]:
            return None
        return found or Outputs.open(path, model=self.run.model_identity)

    def write(
        self,
        split: str,
        path: Path,
        *,
        views: int = 0,
        few: Few | None = None,
        dtype: str = "float32",
        keep_logits: bool | None = None,
    ) -> Path:
        """Write the outputs on one split; returns the file. One launch at a time writes it, others wait.

        With `views` > 0 the training augmentation is applied, anew in every pass. With `few` only so many images
        of every class are read, decoded and run; the class counts stay those of the whole split. Logits are kept unless
        they are many: readers compute them from the features, chunk by chunk.
        """
        with locked(path) if self.world.is_main else nullcontext():
            return self._write(split, path, views=views, few=few, dtype=dtype, keep_logits=keep_logits)

    def _write(
        self,
        split: str,
        path: Path,
        *,
        views: int = 0,
        few: Few | None = None,
        dtype: str = "float32",
        keep_logits: bool | None = None,
    ) -> Path:
        whole_number("views", views, at_least=0)
        self._require_linear_head()
        if views and split != "train":
            raise UserError("augmented views are for the train split; leave out --views")
        if few and split != "train":
            raise UserError("images per class are chosen of the train split alone; leave out --images-per-class")
        images = self.data_run.images(split, self.splits)
        head, shown = head_of(self.model), self.data_run
        places = np.arange(len(images)) if few is None else few.rows(images.labels.numpy())
        size, passes = len(places), max(views, 1)
        if keep_logits is None:
            keep_logits = size * passes * head.out_features <= MANY_LOGITS
        remove_parts(path, self.world)
        self.world.require_alike(
            model=self.run.model_identity,
            split=split,
            views=views,
            few=few,
            dtype=dtype,
            logits=keep_logits,
            images=images.digest,
        )
        chosen = (few.most, few.seed) if few else (None, None)
        details = header(split, views, self.run.model_identity, images.digest, tuple(shown.class_names), *chosen)
        missing = self._run_over(images, places, path, views, details, np.dtype(dtype), keep_logits)
        if missing and not getattr(images, "skip_broken", False):
            raise UserError(f"{missing} of {passes * size} samples are missing from {path}")
        if missing:
            self.display.line(f"left out {missing} images that cannot be read")
        return path

    def _resident(self, images: Images, transform: Transform) -> Images:
        device, limit = self.world.device, self.data_run.config.cache_gb
        return resident(images, transform, device, cache_gb=limit, workers=self.workers, display=self.display)

    def _require_linear_head(self) -> None:
        origin = self.run.calibration
        if origin and origin.head != "Linear":
            raise UserError(
                f"{self.run.folder} does not end in a linear layer: {origin.method} put another head there; "
                f"take the run it came from, {origin.run}"
            )

    def _run_over(
        self,
        images: Images,
        places: np.ndarray,
        path: Path,
        views: int,
        details: dict[str, Any],
        dtype: np.dtype,
        keep_logits: bool,
    ) -> int:
        """Run the network over the images at these places and write its outputs; returns how many rows are missing.

        An image is augmented alike whether others are run beside it or not.
        """
        size, passes, world, whole = len(places), max(views, 1), self.world, len(images)
        plan = [
            (number, draw)
            for number in range(passes)
            for draw in in_order(size, BATCH, numbers=number * whole + places, rank=world.rank, world_size=world.size)
        ]
        images = images if size == whole else images.subset(places)
        head, shown = head_of(self.model), self.data_run
        widths = {"features": head.in_features, "logits": head.out_features if keep_logits else None}
        constant = {"class_counts": shown.class_counts, "group_counts": shown.group_counts, **head_arrays(head)}
        rows = sum(len(draw.indices) for _, draw in plan)
        augmenting, clean = shown.transforms(self.splits)
        network = folded(self.model)
        shown_as = augmenting if views else clean
        images = self._resident(images, shown_as)
        with ExitStack() as stack:
            writer = stack.enter_context(RowWriter(path, rows, widths, dtype, constant, details, world))
            stack.enter_context(torch.no_grad())
            seen = stack.enter_context(watching_head(head_of(network)))
            task = stack.enter_context(self.display.task("extracting", passes * size))
            batches = load(images, shown_as, (draw for _, draw in plan), workers=self.workers, device=world.device)
            for (number, draw), batch in zip(plan, batches, strict=True):
                piece = run_batch(network, batch.images, batch.labels, seen)
                # Samples are numbered on through the passes, so that the parts of all processes can be put in order.
                writer.add(piece.features, piece.logits, piece.labels, number * size + batch.indices)
                task.advance(len(draw.indices) * world.size)
        return join_parts(path, world, passes * size, places)


def _open_known(path: Path, model: str, digest: str, few: Few | None) -> Outputs | None:
    """The outputs in a file, if it is complete and belongs to this model and these images."""
    if not path.is_file():
        return None
    try:
        outputs = Outputs.open(path)
    except UserError:
        return None
    chosen = (few.most, few.seed) if few else (None, None)
    found = (outputs.model, outputs.digest, outputs.images_per_class, outputs.images_seed)
    return outputs if found == (model, digest, *chosen) else None
