"""`longtail calibrate`: stage two, for a run folder or for saved logits."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from longtail.cli.parsing import Output, RunData, loading, parse, refuse
from longtail.errors import UserError
from longtail.files.text import command_on, some_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from longtail.posthoc.base import PostHoc
    from longtail.runs.folder import Run
    from longtail.tasks.calibration import Comparison

HELP = """Calibrate a trained classifier.

Without --method it takes what suits the data, and says so: HALO if at least 20 images were held out of training
(longtail train --validation 0.1), for better accuracy and an honest confidence; else MARC, the paper's method, which
needs no held-out images.

A RUN FOLDER: the model is run once over its training images (one augmented view), the method is fitted, and
the calibrated model is written to a new run folder, RUN/METHOD. If the method needs only some images of
every class, only those are read (--images-per-class all reads all of them).

SAVED LOGITS: no model is needed. Give the logits of training images as a .npz with logits (N, K)
and labels (N,), a .npy with --labels, a .csv with a column of labels, or .safetensors. Held-out
logits (--validation, --test) are scored before and after. If the file has head_weight, MARC scales
its shifts by the norms of the class vectors (otherwise by 1), and the calibrated head is written to
head.safetensors.

Examples:
  longtail calibrate runs/digits
  longtail calibrate runs/c10 --method marc --options gamma auto
  longtail calibrate runs/c10 --method halo --target-prior prior.csv
  longtail calibrate runs/frozen --method probe --target-prior train
  longtail calibrate runs/c10 --method marc --then temperature
  longtail calibrate runs/c10 --most-loss 3 --keep cat
  longtail calibrate runs/c10 --method marc --options solver sgd --views 3 --out runs/c10-sgd
  longtail calibrate train.npz --test test.npz --out calibrated
"""


@dataclass(frozen=True)
class RunOptions(RunData):
    """Only for a run folder."""

    views: int = 1
    """Augmented passes over the training images; 0 for clean images."""
    images_per_class: int | Literal["all", "auto"] = "auto"
    """At most so many training images of every class; auto: as many as the method needs."""
    seed: int = 0
    """Random seed that selects these images."""
    device: str = "auto"
    """auto, cpu, cuda, …"""


@dataclass(frozen=True)
class FileOptions:
    """Only for saved logits."""

    labels: Path | None = None
    """Labels of a .npy file of logits."""
    label_column: str | None = None
    """Column of the labels in .csv files, if it is not called label, labels, y or target."""
    validation: Path | None = None
    """Held-out logits and labels, on which settings are chosen."""
    test: Path | None = None
    """Logits and labels to report on."""


@dataclass(frozen=True)
class Calibrate(Output):
    """What to calibrate, and how."""

    source: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run, or a file of saved logits and labels."""
    method: str | None = None
    """Post-hoc method (default: halo or marc, see above); `longtail methods` lists them."""
    options: dict[str, str] = field(default_factory=dict)
    """Settings of the method, as name value pairs."""
    target_prior: str | None = None
    """halo, probe: class frequencies to be right for: uniform, train, a power of the training prior, or a CSV file with
    lines class,weight."""
    then: Literal["temperature"] | None = None
    """Second step after the method: one temperature that corrects the confidence, fitted on held-out images."""
    most_loss: float | None = None
    """Points of top-1 at the training prior that may be lost at most: the method is applied only as far as held-out
    images allow it."""
    keep: tuple[str, ...] = ()
    """Classes that may not be recognised less often than before, by more than their confidence interval."""
    best: Literal["balanced", "macro_f1"] | None = None
    """Choose the strength of the method by this score on held-out images."""
    strength: float | None = None
    """Apply the method at this strength, from 0 (the unchanged model) to 1."""
    out: Path | None = None
    """Folder of the result (default: RUN/METHOD; required for a file)."""
    overwrite: bool = False
    """Replace the folder if it exists."""
    run: tyro.conf.OmitArgPrefixes[RunOptions] = field(default_factory=RunOptions)
    file: tyro.conf.OmitArgPrefixes[FileOptions] = field(default_factory=FileOptions)

    def build(
        self, held_out: int, build: Callable[[str, dict[str, str]], PostHoc], *, frozen: bool = False
    ) -> tuple[str, PostHoc, str]:
        """Name and method, with its settings, and why it is the default."""
        from longtail.methods import default_posthoc
        from longtail.posthoc import Limited, Tempered

        name, why = (self.method, "") if self.method else default_posthoc(held_out, frozen=frozen)
        settings = self.options
        if self.target_prior is not None:
            if name not in ("halo", "probe"):
                raise UserError(f"--target-prior applies to --method halo and probe, not to {name}")
            settings = {**settings, "target_prior": self.target_prior}
        method = build(name, settings)
        method = method if self.then is None else Tempered(method)
        limits = {"strength": self.strength, "most_loss": self.most_loss, "keep": self.keep, "best": self.best}
        given: dict[str, Any] = {name: value for name, value in limits.items() if value not in (None, ())}
        return name, Limited(method, **given) if given else method, why


def main(words: list[str]) -> int:
    options = parse(Calibrate, words, "longtail calibrate", HELP)
    if options.source.is_dir():
        refuse(options.file, "saved logits", options.source, "a run")
        return _calibrate_run(options, options.run)
    refuse(options.run, "run folders", options.source, "saved logits")
    return _calibrate_file(options, options.file)


def _calibrate_run(options: Calibrate, own: RunOptions) -> int:
    display = options.display()
    with loading():
        from longtail.distributed import join
        from longtail.runs.folder import Run, build_posthoc_for
        from longtail.tasks.calibrate_run import calibrate_run

    with join(own.device) as world:
        run = _uncalibrated(options, Run.open(options.source))
        held_out, frozen = run.split_sizes.get("validation", 0), run.config.train == "head"
        name, method, why = options.build(held_out, partial(build_posthoc_for, run), frozen=frozen)
        world.require_alike(
            model=run.model_identity,
            method=name,
            options=options.options,
            target_prior=options.target_prior,
            views=own.views,
            images_per_class=own.images_per_class,
            seed=own.seed,
        )
        folder, scores = calibrate_run(
            run.using(world, root=own.root, workers=own.workers, display=display),
            method,
            name,
            out=options.out,
            views=own.views,
            images_per_class=own.images_per_class,
            seed=own.seed,
            overwrite=options.overwrite,
        )
    _print(options, name, method, why, scores, folder)
    display.line(f"score it with: {command_on('evaluate', folder, own.root)}")
    return 0


def _uncalibrated(options: Calibrate, run: Run) -> Run:
    """The run to calibrate; for a calibrated run, the run that was calibrated."""
    if run.calibration is None:
        return run
    origin = type(run).open(run.calibration.run)
    if origin.model_identity != run.calibration.model:
        raise UserError(f"{run.folder} is calibrated already, and {origin.folder}, where it came from, has changed")
    options.display().line(f"{run.folder} is calibrated already ({run.calibration.title}): calibrating {origin.folder}")
    return origin


def _calibrate_file(options: Calibrate, own: FileOptions) -> int:
    with loading():
        from longtail.distributed import join
        from longtail.methods import build_posthoc
        from longtail.outputs.readers import read_held_out, read_outputs
        from longtail.tasks.calibrate_run import calibrate_files

    if not options.source.exists():
        raise UserError(f"{options.source} does not exist; name a run folder or a file of saved logits")
    if options.out is None:
        raise UserError("name the folder of the result: --out FOLDER")
    with join("cpu") as world:
        train = read_outputs(options.source, own.labels, label_column=own.label_column)
        held_out = {
            split: read_held_out(path, split, train, own.label_column)
            for split, path in (("validation", own.validation), ("test", own.test))
            if path is not None
        }
        name, method, why = options.build(len(held_out["validation"]) if own.validation else 0, build_posthoc)
        world.require_alike(method=name, options=options.options, target_prior=options.target_prior, samples=len(train))
        scores = calibrate_files(
            train,
            method,
            options.out,
            list(held_out.values()),
            name=name,
            world=world,
            overwrite=options.overwrite,
        )
    _print(options, name, method, why, scores, options.out)
    if not held_out:
        options.display().line("no held-out logits were given (--test FILE), so nothing is scored")
    return 0


def _print(options: Calibrate, name: str, method: PostHoc, why: str, scores: list[Comparison], folder: Path) -> None:
    """Print scores before and after, what was fitted, and what was written."""
    from longtail.methods import describe_posthoc
    from longtail.report.terminal import comparison_table

    display, title = options.display(), describe_posthoc(method, name)[0].title
    for score in scores:
        display.table(comparison_table(score.split, {"before": score.before, title: score.after}))
        for line in _warnings(options, title, score):
            display.line(line)
    if why:
        display.line(f"{title} was taken because {why} (--method NAME takes another one)")
    for note in method.notes():
        display.line(note)
    result = method.result_
    state = "solved" if result.converged else "NOT solved"
    chosen = "".join(f", {name} {value:g}" for name, value in method.chosen_.items())
    display.line(f"{title}{chosen}: {state} in {result.seconds:.2f} s, {result.iterations} iterations")
    files = "" if options.source.is_dir() else f" ({', '.join(sorted(path.name for path in folder.glob('[!.]*')))})"
    display.line(f"written: {folder}{files}")
    rows = {score.split: score.to_dict() for score in scores}
    options.print_json({"out": str(folder), "result": vars(result), "chosen": method.chosen_, **rows})


def _warnings(options: Calibrate, title: str, score: Comparison) -> list[str]:
    """What to know about the scores of a split."""
    from longtail.metrics.intervals import fallen_text

    lines = []
    if score.used:
        # Diagnose holds out images of every class, so it needs all of them.
        diagnose = command_on("diagnose", options.source, options.run.root)
        unbiased = f"; {diagnose} corrects for it" if options.source.is_dir() and not score.missing else ""
        lines.append(
            f"{title} was fitted or chosen on the {score.split} images: its scores there are higher than on new "
            f"images{unbiased}"
        )
    if score.missing:
        lines.append(f"{score.split}: no samples of class {some_of(score.missing)}; the scores are over the others")
    if score.fallen:
        lines.append(f"{score.split}: recognised less often than before: {fallen_text(score.fallen)}")
    if score.collapsed:
        hint = f"; --keep {shlex.quote(score.collapsed[0].name)} or --most-loss 3 applies {title} only in part"
        lost = f"{score.split}: large classes are hardly recognised any more: {fallen_text(score.collapsed, most=3)}"
        lines.append(lost if options.keep or options.most_loss is not None else lost + hint)
    return lines
