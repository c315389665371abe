"""The files that a training run writes, and how a run is resumed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtail.config import TrainConfig, differences
from longtail.data.splits import Splits
from longtail.distributed import World
from longtail.errors import UserError, whole_number
from longtail.files.atomic import remove_unfinished
from longtail.files.reading import require_plain
from longtail.files.records import append_line, keep_lines, read_lines
from longtail.launch import launch_id
from longtail.metrics.scores import Metrics
from longtail.metrics.table import SCORES
from longtail.runs.folder import Run, write_trained
from longtail.runs.record import (
    CHECKPOINT_FILE,
    METRICS_FILE,
    MODEL_FILE,
    PROGRESS_FILE,
    RUN_FILE,
    remove_passing,
    remove_run,
    require_new_run,
    require_writable,
)
from longtail.training.plan import Plan
from longtail.training.state import TrainState, load_checkpoint, save_checkpoint
from longtail.training.trackers import Tracker, build_trackers
from longtail.training.tuning import merged

TICK_SECONDS = 1.0
PRINTED_SCORES = ("top1", "balanced")


class Journal:
    """The files of one run: description, metrics, checkpoint, final weights. Only rank 0 writes."""

    def __init__(
        self, folder: Path, config: TrainConfig, splits: Splits, world: World, trackers: Sequence[str | Tracker] = ()
    ) -> None:
        self.folder = folder
        self.config = config
        self.splits = splits
        self.world = world
        self.loss_sum = torch.zeros(())
        self.loss_steps = 0
        self.resuming = self.replacing = False
        self._last_tick = -math.inf
        self.trackers = build_trackers(trackers) if world.is_main else []

    @property
    def finished(self) -> bool:
        """Whether the run to resume is already finished."""
        return self.resuming and (self.folder / MODEL_FILE).is_file()

    def require_usable(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse a folder in which this run cannot be written; nothing is written yet."""
        seen = self.world.gather((self.folder / RUN_FILE).is_file())
        if len(set(seen)) > 1:
            blind = seen.index(False)
            raise UserError(f"process {blind} cannot see {self.folder}; give all processes the same shared folder")
        exists = seen[0]
        self.resuming = resume or (exists and self._restarted())
        self.replacing = exists and overwrite and not self.resuming
        if not exists and self.resuming:
            raise UserError(f"nothing to resume in {self.folder}: it holds no run")
        if not self.resuming:
            require_new_run(self.folder, overwrite=overwrite)
        else:
            require_writable(self.folder)
            changed = differences(Run.open(self.folder).config, self.config)
            if changed:
                raise UserError(
                    f"{self.folder} was started with another configuration ({'; '.join(changed)}); "
                    "resume it without these options, or replace it with --overwrite"
                )

    def restore(self, state: TrainState, steps: int) -> None:
        """Load the checkpoint of a run that is resumed, if it has one."""
        checkpoint = self.folder / CHECKPOINT_FILE
        if not self.resuming or not checkpoint.is_file():
            return
        header = load_checkpoint(checkpoint, state, steps=steps)
        if header.processes != self.world.size:
            raise UserError(
                f"{checkpoint} was written by {header.processes} processes, there are {self.world.size} now; "
                "resume with the same number of processes"
            )
        self.loss_sum.fill_(header.loss_sums[self.world.rank])
        self.loss_steps = header.loss_steps

    def begin(self, state: TrainState) -> None:
        """Write the description of a new run before any other file, or remove what a resumed run will write again."""
        self.world.barrier()
        if self.world.is_main:
            for name in (RUN_FILE, CHECKPOINT_FILE, MODEL_FILE, METRICS_FILE):
                remove_unfinished(self.folder / name)  # left by killed processes
            if self.finished:
                remove_passing(self.folder)
            elif self.resuming:
                path = self.folder / METRICS_FILE
                steps = [(whole_number(f"step in {path}", line.get("step")), line) for line in read_lines(path)]
                keep_lines(path, [line for step, line in steps if step <= state.step])
            else:
                if self.replacing:
                    remove_run(self.folder)
                Run.create(self.folder, self.config, self.splits, started_by=launch_id())
        self.world.barrier()
        try:
            for tracker in () if self.finished else self.trackers:
                tracker.start(self.folder, asdict(self.config), state.step)
        except UserError:
            self.forget_beginning()
            raise

    def forget_beginning(self) -> None:
        """If training failed before its first checkpoint, remove everything that would block the corrected command."""
        kept = any((self.folder / name).exists() for name in (CHECKPOINT_FILE, MODEL_FILE))
        if self.world.is_main and not self.resuming and not kept:
            for name in (RUN_FILE, METRICS_FILE, PROGRESS_FILE):
                (self.folder / name).unlink(missing_ok=True)

    def _restarted(self) -> bool:
        """Whether torchrun has restarted the processes of this run after it lost one."""
        # The restart count belongs to one agent; an agent that restarts because another did keeps its own count.
        if not any(self.world.gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")):
            return False
        started_by = Run.open(self.folder).record.started_by
        return bool(self.world.gather(started_by == launch_id())[0])

    def add(self, loss: Tensor) -> None:
        """Add the loss of one step to the mean that is recorded next."""
        self.loss_sum = self.loss_sum.to(loss.device) + loss
        self.loss_steps += 1

    def tick(self, images: int) -> None:
        """Write how many images were seen, for another process that shows progress; at most once a second."""
        now = time.monotonic()
        if self.world.is_main and now - self._last_tick >= TICK_SECONDS:
            self._last_tick = now
            with suppress(OSError):  # a full disk stops the run when it writes a file that matters
                require_plain(self.folder / PROGRESS_FILE)
                (self.folder / PROGRESS_FILE).write_text(f"{images}\n")

    def mean_loss(self) -> float:
        """Mean loss since the last record, over all processes; raises if it is not finite."""
        total = torch.stack([self.loss_sum, torch.tensor(float(self.loss_steps), device=self.loss_sum.device)])
        loss_sum, steps = self.world.sum(total).tolist()
        mean = loss_sum / max(steps, 1)
        if not math.isfinite(mean):
            raise UserError("the loss is no longer finite; use a smaller --lr or a longer --warmup")
        return mean

    def record(self, plan: Plan, state: TrainState, loss: float, metrics: Metrics | None, speed: float) -> str:
        """Append a line to the metrics file; returns a readable version."""
        entry: dict[str, Any] = {
            "step": state.step,
            "epoch": round(plan.epochs_at(state.step), 3),
            "images": plan.images_at(state.step),
            "loss": loss,
            "lr": plan.learning_rate(state.step - 1),
            "images_per_s": round(speed, 1),
        }
        text = f"{plan.named(state.step)}  loss {loss:.4f}"
        if metrics:
            entry["validation"] = {name: getattr(metrics, name) for name in SCORES}
            shown = (f"{SCORES[name].heading} {SCORES[name].show(getattr(metrics, name))}" for name in PRINTED_SCORES)
            text += f"  validation: {', '.join(shown)}"
        if self.world.is_main:
            append_line(self.folder / METRICS_FILE, entry)
            values = {f"train/{name}": entry[name] for name in ("loss", "lr", "images_per_s")}
            values |= {f"validation/{name}": value for name, value in entry.get("validation", {}).items()}
            for tracker in self.trackers:
                tracker.log(state.step, {name: value for name, value in values.items() if value is not None})
        self.loss_sum.zero_()
        self.loss_steps = 0
        return text

    def save(self, state: TrainState) -> None:
        """Write the checkpoint."""
        sums = self.world.gather(float(self.loss_sum))
        if self.world.is_main:
            save_checkpoint(self.folder / CHECKPOINT_FILE, state, loss_sums=sums, loss_steps=self.loss_steps)
        self.world.barrier()

    def finish(self, state: TrainState) -> None:
        """Write the final weights; the checkpoint is no longer needed."""
        if self.world.is_main:
            write_trained(self.folder, merged(state.result), state.step)
            remove_passing(self.folder)
        self.world.barrier()

    def close(self) -> None:
        """Close the trackers; called at the end of training and after an interruption."""
        for tracker in self.trackers:
            tracker.finish()
