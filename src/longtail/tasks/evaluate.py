"""Scores a run on one of its splits, as it is, cut to a long tail, or for other class frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longtail.config import WORKERS
from longtail.data.imbalance import TEST_ORDERS, profile_indices
from longtail.distributed import join
from longtail.errors import UserError
from longtail.files.atomic import write_json
from longtail.files.progress import QUIET, Display
from longtail.files.records import FORMAT
from longtail.metrics.scores import Metrics, evaluate_chunks
from longtail.outputs.record import Outputs
from longtail.runs.folder import Run
from longtail.runs.network import score

KNOWN = "known"


@dataclass(frozen=True)
class TestProfile:
    """A long-tailed subset of the scored images: `forward:50`, `backward:10`."""

    order: str
    factor: float

    @classmethod
    def parse(cls, text: str) -> TestProfile:
        order, _, factor = text.partition(":")
        try:
            profile = cls(order, float(factor))
        except ValueError:
            profile = cls("", 0.0)
        if profile.order not in TEST_ORDERS or not 1 <= profile.factor < np.inf:
            raise UserError(f"--test-profile is forward:N or backward:N with an imbalance of at least 1, not {text}")
        return profile

    def __str__(self) -> str:
        return f"{self.order}-{self.factor:g}"

    def rows(self, outputs: Outputs) -> np.ndarray:
        """The rows of the chosen images."""
        order = np.argsort(-outputs.class_counts, kind="stable")
        return profile_indices(outputs.labels, self.factor, self.order, class_order=order)


def evaluate_run(
    folder: Path | str,
    split: str | None = None,
    *,
    test_profile: str | None = None,
    target_prior: float | str | None = None,
    root: str | None = None,
    device: str = "auto",
    workers: int = WORKERS,
    display: Display = QUIET,
) -> tuple[Metrics, Run, Path]:
    """Metrics of a finished run on a split, the run, and the JSON file they were written to.

    Args:
        folder: of the run.
        split: train, validation or test; by default test images or, if there are none, validation images.
        test_profile: score a long-tailed subset, "forward:50" or "backward:50".
        target_prior: class frequencies to be right for, as in `HALO`; "estimate": from the images, without their
            labels; "known": those of the scored labels.
        root: folder of the data set, if it has moved since training.
        device: auto, cpu, cuda, …
        workers: processes that decode images read from files.
        display: where progress is shown.
    """
    profile = None if test_profile is None else TestProfile.parse(test_profile)
    with join(device) as world:
        run = Run.open(folder).using(world, root=root, workers=workers, display=display)
        if split is None:
            split = run.scored_split or "test"
            if split != "test" and world.is_main:
                display.line(f"there are no test images: scored on {run.split_sizes[split]:,} {split} images")
        world.require_alike(model=run.model_identity, split=split, profile=str(profile), target_prior=str(target_prior))
        origin: dict[str, Any] = {"format": FORMAT, "model": run.model_identity, "split": split}
        if profile is None and target_prior is None:
            loader = run.loader(split)
            metrics = score(run.network, loader, run.group_counts, display)
            path = run.folder / f"metrics-{split}.json"
            origin["skipped"] = len(loader.images) - metrics.samples
        else:
            metrics, name, record = _score_outputs(run, split, profile, target_prior)
            subset = None if profile is None else str(profile)
            path = run.folder / f"metrics-{'-'.join(filter(None, (split, subset, name)))}.json"
            origin |= {"test_profile": subset, "target_prior": record}
        if world.is_main:
            write_json(path, {**origin, **metrics.to_dict()})
        world.barrier()
    return metrics, run, path


def _score_outputs(
    run: Run, split: str, profile: TestProfile | None, target_prior: float | str | None
) -> tuple[Metrics, str, Any]:
    """Scores of stored outputs, of the rows of a profile, at a target prior; the prior's name in a file and record."""
    from longtail.posthoc.priors import shifted  # slow to import, and often not needed
    from longtail.tasks.deployment import Deployment, estimate_lines, estimate_record

    outputs = run.outputs(split)
    rows = np.arange(len(outputs)) if profile is None else profile.rows(outputs)
    labels, logits = outputs.labels[rows], outputs.rows().only(rows)
    shift, name, record = np.zeros(len(run.class_names)), "", None
    if target_prior is not None:
        name = f"prior-{'file' if Path(str(target_prior)).is_file() else target_prior}"
        prior = np.bincount(labels, minlength=len(shift)) if target_prior == KNOWN else target_prior
        probabilities = np.concatenate([chunk.softmax(1).numpy() for _, chunk in logits.chunks()])
        shift, estimate = Deployment.of(run).shift_for(prior, probabilities)
        record = str(target_prior) if estimate is None else estimate_record(estimate)
        for line in () if estimate is None else estimate_lines(estimate, run.class_names):
            run.display.line(line)
    chunks = (shifted(chunk, shift).numpy() for _, chunk in logits.chunks())
    return evaluate_chunks(chunks, labels, run.group_counts), name, record
