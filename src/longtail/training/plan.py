"""The schedule of a training run, computed from its configuration: steps, epochs, learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from longtail.config import TrainConfig
from longtail.networks.objective import Progress


@dataclass(frozen=True)
class Plan:
    """Length and learning rate of a training run.

    Args:
        steps: batches in all.
        batch_size: images per step of one stream, over all processes.
        epoch_images: images of one epoch.
        lr: learning rate after warm-up.
        warmup: steps over which the learning rate rises.
        warmup_from: learning rate at the start of the warm-up.
        streams: streams of images that a step draws a batch from.
        stages: number of stages of equal length; the learning rate schedule restarts in each.
    """

    steps: int
    batch_size: int
    epoch_images: int
    lr: float
    warmup: int = 0
    warmup_from: float = 0.0
    streams: int = 1
    stages: int = 1

    @classmethod
    def of(cls, config: TrainConfig, train_images: int, *, streams: int = 1, stages: int = 1) -> Plan:
        epochs = 1 if config.train == "head" else config.epochs  # features are computed in one pass
        if config.iterations is not None and config.train != "head":
            steps = config.iterations
        else:
            assert epochs is not None  # TrainConfig has one of the two
            steps = math.ceil(epochs * train_images / config.batch_size)
        return cls(
            steps, config.batch_size, train_images, config.lr, config.warmup, config.warmup_from, streams, stages
        )

    def epochs_at(self, step: int) -> float:
        """Passes over the data before a step, of the first stream."""
        return step * self.batch_size / self.epoch_images

    def images_at(self, step: int) -> int:
        """Images seen before a step, over all streams."""
        return step * self.batch_size * self.streams

    def epoch(self, step: int) -> int:
        """Whole epochs done before a step."""
        return step * self.batch_size // self.epoch_images

    def named(self, step: int) -> str:
        """The epoch that a step belongs to, counted from 1.

        >>> plan = Plan(steps=5, batch_size=64, epoch_images=107, lr=1.0)  # three epochs
        >>> [plan.named(step) for step in (1, 2, 3, 4, 5)]
        ['epoch 1/3', 'epoch 1/3', 'epoch 2/3', 'epoch 2/3', 'epoch 3/3']
        """
        return f"epoch {self.epoch(step - 1) + 1}/{self.epoch(self.steps - 1) + 1}"

    def progress(self, step: int) -> Progress:
        return Progress(step, self.steps, self.epoch(step), self.epochs_at(self.steps), self.learning_rate(step))

    def due(self, step: int, every: int) -> bool:
        """Whether `every` epochs have passed at the end of this step; always after the last."""
        return step + 1 == self.steps or self.epoch(step + 1) // every > self.epoch(step) // every

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to 0; restarts in every stage.

        >>> plan = Plan(steps=100, batch_size=1, epoch_images=1, lr=1.0, warmup=10)
        >>> plan.learning_rate(0), plan.learning_rate(10), round(plan.learning_rate(55), 3)
        (0.1, 1.0, 0.5)
        """
        # The stage follows from the share of steps done, as in the objectives.
        stage = min(self.stages * step // self.steps, self.stages - 1)
        first, last = (math.ceil(edge * self.steps / self.stages) for edge in (stage, stage + 1))
        done = step - first
        if done < self.warmup:
            return self.warmup_from + (self.lr - self.warmup_from) * (done + 1) / self.warmup
        share = (done - self.warmup) / max(last - first - self.warmup, 1)
        return self.lr * (1 + math.cos(math.pi * share)) / 2
