"""`longtail calibrate`: stage two, for a run folder or for saved logits."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from longtail.cli.parsing import Output, RunData, SavedLogits, parse, refuse
from longtail.errors import UserError
from longtail.files.text import command_on, some_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from longtail.posthoc.base import PostHoc
    from longtail.tasks.calibration import Comparison

MULTILABEL = "multilabel"
NOT_SCORED = "no held-out logits were given (--test FILE), so nothing is scored"
HELP = """Calibrate a trained classifier.

The default method is HALO if at least 20 images were held out of training (longtail train --validation 0.1), for better
accuracy and confidence; else MARC, the paper's method, which needs no held-out images.

A RUN FOLDER: the model is run once over its training images (or as many of every class as the method needs), the method
is fitted, and the calibrated model is written to a new run folder, RUN/METHOD.

SAVED LOGITS: no model is needed. Give logits of training images as a .npz with logits (N, K) and labels (N,), a .npy
with --labels, a .csv with a column of labels, or .safetensors. Held-out logits (--validation, --test) are scored before
and after. If the file has head_weight, MARC scales its shifts by the norms of the class vectors (otherwise by 1), and
the calibrated head is written to head.safetensors.

SEVERAL LABELS PER SAMPLE (sigmoids): --method multilabel fits a scale and a shift for every label on held-out logits
(N, K) with labels (N, K) of 0 and 1: SOURCE, or --validation if SOURCE holds training samples. --target-prior is the
share of positives that labels will have: train (as in these samples), balanced, a number, or a CSV file (label,share).

Examples:
  longtail calibrate runs/digits
  longtail calibrate runs/c10 --method marc --options gamma auto
  longtail calibrate runs/c10 --method halo --target-prior prior.csv
  longtail calibrate runs/frozen --method probe --target-prior train
  longtail calibrate runs/c10 --method marc --then temperature
  longtail calibrate runs/c10 --most-loss 3 --keep cat
  longtail calibrate runs/c10 --costs costs.csv
  longtail calibrate runs/c10 --method marc --options solver sgd --views 3 --out runs/c10-sgd
  longtail calibrate train.npz --test test.npz --out calibrated
  longtail calibrate held-out.npz --method multilabel --test test.npz --out calibrated
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
class FileOptions(SavedLogits):
    """Only for saved logits."""

    labels: Path | None = None
    """Labels of a .npy file of logits."""


@dataclass(frozen=True)
class Calibrate(Output):
    """What to calibrate, and how."""

    source: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run, or a file of saved logits and labels."""
    method: str | None = None
    """Post-hoc method (default: halo or marc, see above); `longtail methods` lists them. multilabel: see above."""
    options: dict[str, str] = field(default_factory=dict)
    """Settings of the method, as name value pairs."""
    target_prior: str | None = None
    """halo, probe: class frequencies to be right for: uniform, train, a power of the training prior, or a CSV file with
    lines class,weight. multilabel: see above."""
    then: Literal["temperature"] | None = None
    """Second step after the method: one temperature that corrects the confidence, fitted on held-out images."""
    most_loss: float | None = None
    """Points of top-1 at the training prior that may be lost at most: the method is applied only as far as held-out
    images allow it."""
    keep: tuple[str, ...] = ()
    """Classes that may not be recognised less often than before, by more than their confidence interval."""
    best: Literal["balanced", "macro_f1"] | None = None
    """Choose the strength of the method by this score on held-out images."""
    costs: str | None = None
    """Choose the strength with the lowest mean cost on held-out images: a CSV file whose first line names the predicted
    classes, and every other line a true class and what it costs to take it for each of them."""
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
        limits = {name: getattr(self, name) for name in ("strength", "most_loss", "keep", "best", "costs")}
        given: dict[str, Any] = {name: value for name, value in limits.items() if value not in (None, ())}
        return name, Limited(method, **given) if given else method, why


def main(words: list[str]) -> int:
    options = parse(Calibrate, words, "longtail calibrate", HELP)
    if options.source.is_dir():
        refuse(options.file, "saved logits", options.source, "a run")
        if options.method == MULTILABEL:
            raise UserError(f"--method {MULTILABEL} takes saved logits (.npz), and {options.source} is a run")
        return _calibrate_run(options, options.run)
    refuse(options.run, "run folders", options.source, "saved logits")
    if not options.source.exists():
        raise UserError(f"{options.source} does not exist; name a run folder or a file of saved logits")
    if options.out is None:
        raise UserError("name the folder of the result: --out FOLDER")
    calibrate = _calibrate_labels if options.method == MULTILABEL else _calibrate_file
    return calibrate(options, options.file, options.out)


def _calibrate_run(options: Calibrate, own: RunOptions) -> int:
    display = options.display()
    from longtail.distributed import join
    from longtail.posthoc.costs import read_costs
    from longtail.runs.folder import Run, build_posthoc_for
    from longtail.tasks.calibrate_run import calibrate_run

    images: dict[str, Any] = {"views": own.views, "images_per_class": own.images_per_class, "seed": own.seed}
    with join(own.device) as world:
        run = Run.open(options.source)
        if origin := run.calibration:  # the run that was calibrated is calibrated
            run = Run.open(origin.run)
            calibrated = f"{options.source} is calibrated already"
            if run.model_identity != origin.model:
                raise UserError(f"{calibrated}, and {run.folder}, where it came from, has changed")
            display.line(f"{calibrated} ({origin.title}): calibrating {run.folder}")
        if options.costs is not None:
            read_costs(options.costs, run.class_names)  # refused before the network is run
        held_out = run.split_sizes.get("validation", 0)
        name, method, why = options.build(held_out, partial(build_posthoc_for, run), frozen=run.is_frozen)
        given = {"method": name, "options": options.options, "target_prior": options.target_prior}
        world.require_alike(model=run.model_identity, **given, **images)
        run = run.using(world, root=own.root, workers=own.workers, display=display)
        overwrite = options.overwrite
        folder, scores = calibrate_run(run, method, name, out=options.out, overwrite=overwrite, **images)
    _print(options, name, method, why, scores, folder)
    display.line(f"next: {command_on('report', run.folder if folder.parent == run.folder else folder, own.root)}")
    return 0


def _calibrate_file(options: Calibrate, own: FileOptions, out: Path) -> int:
    from longtail.distributed import join
    from longtail.methods import build_posthoc
    from longtail.outputs.readers import read_held_out, read_outputs
    from longtail.tasks.calibrate_run import calibrate_files

    with join("cpu") as world:
        train = read_outputs(options.source, own.labels, label_column=own.label_column)
        files = {"validation": own.validation, "test": own.test}
        held_out = {
            split: read_held_out(path, split, train, own.label_column)
            for split, path in files.items()
            if path is not None
        }
        name, method, why = options.build(len(held_out.get("validation", ())), build_posthoc)
        given = {"method": name, "options": options.options, "target_prior": options.target_prior}
        world.require_alike(**given, samples=len(train))
        scores = calibrate_files(train, method, out, held_out, name=name, world=world, overwrite=options.overwrite)
    _print(options, name, method, why, scores, out)
    if why and own.test and not own.labels:  # the report fits the same method, and needs test samples
        places = {"--label-column": own.label_column, "--validation": own.validation, "--test": own.test}
        words = [str(word) for pair in places.items() if pair[1] for word in pair]
        options.display().line(f"next: {command_on('report', options.source, None, *words, '--out', 'report')}")
    if not held_out:
        options.display().line(NOT_SCORED)
    return 0


def _calibrate_labels(options: Calibrate, own: FileOptions, out: Path) -> int:
    """Several labels per sample: fit on held-out logits, score the test logits before and after."""
    from longtail.outputs.readers import read_label_outputs
    from longtail.report.terminal import numbers_table
    from longtail.tasks.calibrate_labels import METHOD, SCORES, calibrate_labels, multilabel_method

    limits = {"then": options.then, "most-loss": options.most_loss, "keep": options.keep or None, "best": options.best}
    for name, value in {**limits, "strength": options.strength}.items():
        if value is not None:
            raise UserError(f"--{name} does not apply to --method {MULTILABEL}; leave it out")
    source, display = own.validation or options.source, options.display()
    fitted_on = read_label_outputs(source, None if own.validation else own.labels, label_column=own.label_column)
    held_out = {"test": read_label_outputs(own.test, split="test", label_column=own.label_column)} if own.test else {}
    if own.test and held_out["test"].names != fitted_on.names:
        raise UserError(f"{own.test} has other labels than {source}: their number or class_names differ")
    method = multilabel_method(options.options, options.target_prior, fitted_on.names)
    scores = calibrate_labels(fitted_on, method, out, held_out, overwrite=options.overwrite)
    for split, score in scores.items():
        before, after = (["none" if one is None else f"{one:.3f}" for one in row.values()] for row in score.values())
        rows = zip(SCORES.values(), before, after, strict=True)
        display.table(numbers_table(split, ("score, mean over labels", "before", METHOD.title), rows))
    display.line(f"fitted on {len(fitted_on.labels):,} samples of {source}: the network must not have seen them")
    if not held_out:
        display.line(NOT_SCORED)
    display.line(f"written: {out} ({', '.join(sorted(path.name for path in out.glob('[!.]*')))})")
    options.print_json({"out": str(out), "result": vars(method.result_), **scores})
    return 0


def _print(options: Calibrate, name: str, method: PostHoc, why: str, scores: list[Comparison], folder: Path) -> None:
    """Print scores before and after, what was fitted, and what was written."""
    from longtail.methods import POSTHOC_METHODS, describe_posthoc
    from longtail.report.terminal import comparison_table

    display, title = options.display(), describe_posthoc(method, name)[0].title
    for score in scores:
        display.table(comparison_table(score.split, {"before": score.before, title: score.after}))
        for line in _warnings(options, title, score):
            display.line(line)
    if why:
        display.line(f"{POSTHOC_METHODS[name].title} was taken because {why} (--method NAME takes another one)")
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
