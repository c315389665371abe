"""The training images in the order in which the steps take them: one stream per sampler of the method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longtail.config import TrainConfig
from longtail.core.progress import Display
from longtail.data.images import DecodedImages, Images
from longtail.data.loading import Batch, load, resident
from longtail.data.samplers import Draw, Sampler
from longtail.data.splits import Splits
from longtail.distributed.world import World
from longtail.errors import UserError
from longtail.runs.network import transforms
from longtail.training.plan import Plan

Parts = list[list[Batch]]


class Streams:
    """Batches of a run for this process.

    Args:
        config: of the run.
        splits: its images.
        names: samplers of the method, one per stream.
        world: this process among those that train together.
        display: where progress of decoding is shown.
    """

    def __init__(
        self, config: TrainConfig, splits: Splits, names: Sequence[str], world: World, display: Display
    ) -> None:
        self.config = config
        self.splits = splits
        self.world = world
        self.display = display
        self.samplers = self._samplers(names)
        # One augmenting transform per stream: streams of one sampler show the same images differently.
        self.transforms = [transforms(config, splits, stream)[0] for stream in range(len(self.samplers))]
        self.clean = transforms(config, splits)[1]

    def _samplers(self, names: Sequence[str]) -> list[Sampler]:
        config = self.config
        if config.sampler is not None:
            if len(names) > 1:
                raise UserError(f"{config.method} has its own samplers ({', '.join(names)}); leave out --sampler")
            names = (config.sampler,)
        if config.batch_size % (config.accumulate * self.world.size):
            raise UserError(
                f"--batch-size {config.batch_size} does not divide into {config.accumulate} parts x "
                f"{self.world.size} processes"
            )
        labels = self.splits.train.labels.numpy()
        epochs = Plan.of(config, len(labels)).progress(0).epochs
        return [Sampler(labels, name, seed=config.seed, epochs=epochs) for name in names]

    def open_images(self) -> None:
        """Move the images to where they are read fastest; raises if an image is broken."""
        self.images = self._resident(self.splits.train, augmented=True)
        held_out = self.splits.validation
        self.validation = None if held_out is None else self._resident(held_out, augmented=False)

    def _resident(self, images: Images, *, augmented: bool) -> Images:
        return resident(
            images,
            self.transforms[0] if augmented else self.clean,
            self.world.device,
            cache_gb=self.config.cache_gb,
            workers=self.config.workers,
            display=self.display,
        )

    @property
    def decodes(self) -> bool:
        """Whether worker processes decode images while the network computes."""
        return isinstance(self.images, DecodedImages) and self.config.workers > 0

    def batches(self, first: int, last: int, *, workers: int | None = None) -> Iterator[Parts]:
        """For each step from `first` to before `last`: for each part of the batch, one batch per stream."""
        workers = self.config.workers if workers is None else workers
        streams = [
            load(self.images, transform, self.draws(sampler, first, last), workers=workers, device=self.world.device)
            for transform, sampler in zip(self.transforms, self.samplers, strict=True)
        ]
        for _ in range(first, last):
            yield [[next(stream) for stream in streams] for _ in range(self.config.accumulate)]

    def draws(self, sampler: Sampler, first: int, last: int) -> Iterator[Draw]:
        """This process's draws of one stream, part by part."""
        parts = self.config.accumulate
        size = self.config.batch_size // parts
        for number in range(first * parts, last * parts):
            yield sampler.batch(number, size, self.world.rank, self.world.size)
