"""The training loop: steps, evaluations, checkpoints, and stopping between two steps when a signal arrives."""

from __future__ import annotations

import copy
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longtail.backbones.library import library_of
from longtail.config import TrainConfig, comparable
from longtail.data.splits import open_splits
from longtail.distributed import World, join
from longtail.errors import Interrupted, UserError
from longtail.files.atomic import locked_folder
from longtail.files.progress import QUIET, Display
from longtail.files.reading import resolved
from longtail.files.text import clock
from longtail.launch import signal_handler, termination_signals
from longtail.metrics.scores import Metrics
from longtail.outputs.loaders import ImageLoader
from longtail.recipes import with_authors_settings
from longtail.runs.folder import Run
from longtail.runs.network import score, settled
from longtail.training.defaults import recipe_for
from longtail.training.journal import Journal
from longtail.training.setup import MicroBatches, TrainingSetup, TrainingStep, fork_rng, warn_if_slow
from longtail.training.trackers import Tracker
from longtail.training.tuning import described, fit_head

LARGE_FOR_ADAMW = 0.02  # learning rate
LONG = 1800.0  # seconds of training, above which a shorter one is offered
NOTE_EVERY = 20  # steps between readings of the loss, because each reading waits for the device


class StopRequest:
    """Turns Ctrl-C, the scheduler's SIGTERM and a closed terminal into a request to stop after the current step."""

    def __init__(self) -> None:
        self._asked = 0  # the number of the signal

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """A block in which signals are requests; in a thread other than the main one the caller stops training."""
        with signal_handler(self._ask, signal.SIGINT, *termination_signals()):
            yield self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM

    def requested(self, world: World) -> int:
        """The signal that any process received; 0 if none."""
        if world.size == 1:
            return self._asked  # without waiting for the device
        counts = torch.zeros(2, device=world.device)
        if self._asked:
            counts[int(self._asked == signal.SIGTERM)] = 1
        interrupted, terminated = world.sum(counts).tolist()
        return signal.SIGTERM if terminated else signal.SIGINT if interrupted else 0


class Trainer:
    """One training run in one folder.

    The constructor checks settings, images, folder, and one step on a copy. Files are written only after that.
    Arguments are those of `train`.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        world: World,
        display: Display,
        *,
        resume: bool = False,
        overwrite: bool = False,
        trackers: Sequence[str | Tracker] = (),
        if_long: str = "",
    ) -> None:
        self.config = config
        self.if_long = if_long
        self.world = world
        self.display = display if world.is_main else QUIET
        self.splits = open_splits(config)
        if config.data == "folder" and config.root and resolved(folder).is_relative_to(resolved(Path(config.root))):
            raise UserError(
                f"{folder} is inside the images of {config.root}; choose another --out"
            )  # it would be a class
        self.journal = Journal(folder, config, self.splits, world, trackers)
        self.journal.require_usable(resume=resume, overwrite=overwrite)
        world.require_alike(**comparable(config), resume=resume, images=self.splits.train.digest)
        self.setup = TrainingSetup(config, self.splits, world, self.display)
        self.state, self.plan = self.setup.state, self.setup.plan
        if not self.journal.finished:
            self.journal.restore(self.state, self.plan.steps)
            self.setup.open_images()
            if self.state.step < self.plan.steps:  # a run may be killed after its last step
                self._rehearse()
        self.journal.begin(self.state)

    def _rehearse(self) -> None:
        """Try one step on a copy, and print how long the remaining steps will take."""
        warn_if_slow(self.config, self.world.device, self.display)
        seconds = self.setup.rehearse()
        self.display.line(described(self.state.model, self.config))
        steps = f"{self.plan.steps - self.state.step:,} steps of {self.config.batch_size} images"
        work = f"features of {len(self.splits.train):,} images" if self.config.train == "head" else steps
        self.display.line(f"{work}: about {clock(seconds)} here{self.if_long if seconds > LONG else ''}")

    def run(self) -> Metrics | None:
        """Train to the end; returns the last validation metrics, None without a validation split."""
        if self.journal.finished:
            self.display.line(f"{self.journal.folder} is already finished")
            return None
        try:
            return self._fit_head() if self.config.train == "head" else self._train()
        except UserError:
            self.journal.forget_beginning()
            raise
        finally:
            self.journal.close()

    def _fit_head(self) -> Metrics | None:
        """Fit the head on the features of a frozen network, and write the run."""
        run = Run.open(self.journal.folder).using(self.world, workers=self.config.workers, display=self.display)
        loss = fit_head(self.state.model, run)
        self.state.step = self.plan.steps
        metrics = self._evaluate()
        text = self.journal.record(self.plan, self.state, loss, metrics, 0.0)
        self.display.line(text.replace(self.plan.named(self.state.step), "head fitted"))
        self.journal.finish(self.state)
        return metrics

    def _train(self) -> Metrics | None:
        metrics = None
        step = TrainingStep(self._compiled() if self.config.compile else self.state.model, self.state.objective)
        distributed = DistributedDataParallel(step) if self.world.size > 1 else step
        total, done = self.plan.images_at(self.plan.steps), self.plan.images_at(self.state.step)
        with StopRequest().listening() as stop, self.display.task("training", total, done=done) as task:
            for batches in self._batches():
                self.journal.add(self._step(distributed, batches))
                note = ""
                if self.state.step % NOTE_EVERY == 0:
                    note = f"{self.plan.named(self.state.step)}  loss {self.journal.mean_loss():.3f}"
                task.advance(self.plan.images_at(1), note)
                self.journal.tick(self.plan.images_at(self.state.step))
                last = self.state.step - 1
                if self.plan.due(last, self.config.evaluate_every):
                    loss = self.journal.mean_loss()  # first, because it stops a run that has diverged
                    metrics = self._evaluate()
                    self.display.line(self.journal.record(self.plan, self.state, loss, metrics, task.speed))
                if self.plan.due(last, self.config.checkpoint_every):
                    self.journal.save(self.state)
                if (number := stop.requested(self.world)) and self.state.step < self.plan.steps:
                    self.journal.save(self.state)
                    raise Interrupted(self.state.step, number)
        self.journal.finish(self.state)
        return metrics

    def _compiled(self) -> nn.Module:
        """The compiled network, or the network itself if compilation fails."""
        model, images = self.state.model, next(self._batches())[0][0].images
        try:
            # The trial runs on a copy, because it must not change batch-norm statistics.
            trial = torch.compile(copy.deepcopy(model))
            trial(images).sum().backward()
        except Exception as error:  # the compiler fails in many ways: none of them should end a training run
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.display.line(f"torch.compile does not work here, training continues without it: {reason}")
            return model
        return torch.compile(model)  # type: ignore[return-value]

    def _step(self, step: nn.Module, batches: MicroBatches) -> Tensor:
        return self.setup.take_step(step, self.state, batches)

    def _batches(self) -> Iterator[MicroBatches]:
        """The batches of the steps that are left."""
        return self.setup.batches(self.state.step, self.plan.steps)

    def _evaluate(self) -> Metrics | None:
        images = self.setup.validation
        if images is None:
            return None
        model = self.state.result
        # Batch-norm statistics are those of rank 0, which are saved, for the rows of all processes.
        self.world.broadcast(model.buffers())
        counts = self.splits.group_counts.numpy()
        loader = ImageLoader(images, self.setup.clean, world=self.world, workers=self.config.workers)
        return score(model, loader, counts)


def train(
    config: TrainConfig | str,
    out: Path | str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    download: bool = False,
    trackers: Sequence[str | Tracker] = (),
    progress: bool = True,
    display: Display | None = None,
    if_long: str = "",
) -> Metrics | None:
    """Train a network and write a run to folder `out`.

    Returns the validation metrics after the last step, None without a validation split. Works in one
    process or in the processes of `torchrun`. The state of the caller's random generators does not change.

    Args:
        config: what to train, the name of a recipe, or the path of images (see `recipe_for`).
        out: folder of the run.
        resume: continue from the checkpoint in the folder, bit for bit.
        overwrite: replace a run in the folder.
        download: download CIFAR first if it is missing.
        trackers: also log the scores of each evaluation to: tensorboard, mlflow, wandb, csv, or objects with
            the methods of `longtail.training.trackers.Tracker`.
        progress: show a progress bar, in a terminal or a notebook.
        display: where progress is shown, instead of `progress`.
        if_long: text after the expected duration, if it is above half an hour.
    """
    config = settled(with_authors_settings(recipe_for(config) if isinstance(config, str) else config))
    if config.data == "places-lt" and config.weights is None:
        warnings.warn("the paper starts Places-LT from ImageNet weights: give them with --weights FILE", stacklevel=2)
    if config.train != "all" and not (config.weights or (config.pretrained and library_of(config.backbone))):
        frozen = f"--train {config.train} keeps layers of {config.backbone} at random weights"
        warnings.warn(f"{frozen}; give pretrained ones: --weights FILE, --backbone timm:NAME or hf:NAME", stacklevel=2)
    if config.optimizer == "adamw" and config.lr >= LARGE_FOR_ADAMW:
        warnings.warn(f"--lr {config.lr:g} is large for AdamW; about 0.001 is usual", stacklevel=2)
    display = display or Display(quiet=not progress)
    with join(config.device) as world, fork_rng(world.device):
        if download:
            from longtail.data.cifar import download_cifar

            if world.is_main:
                download_cifar(config.data, config.root, display)
            world.barrier()
        options = {"resume": resume, "overwrite": overwrite}
        # The lock keeps other processes from training in this folder; it is released when this process ends.
        with locked_folder(Path(out)) if world.is_main else nullcontext():
            return Trainer(config, Path(out), world, display, **options, trackers=trackers, if_long=if_long).run()
