"""`longtail calibrate`: stage two."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from longtail.cli.loading import loading
from longtail.cli.parsing import Output, parse, refuse
from longtail.core.machine import WORKERS
from longtail.core.text import command_on, some_of
from longtail.errors import UserError

if TYPE_CHECKING:
    from longtail.posthoc.base import PostHoc
    from longtail.runs.folder import Run
    from longtail.tasks.calibration import Comparison

HELP = """Calibrate a trained classifier: MARC by default, any post-hoc method by name.

For a run folder: runs the model once over its training images (one augmented view), fits the method
and writes the calibrated model to a new run folder, RUN/METHOD. If the method needs only some images of
every class, only those are read (--images-per-class all reads all of them).

For saved logits: no model is needed. Give the logits of training images as a .npz with logits (N, K)
and labels (N,), a .npy with --labels, a .csv with a column called label, or .safetensors. Held-out
logits (--validation, --test) are scored before and after. If the file has head_weight, MARC scales
its shifts by the norms of the class vectors (otherwise by 1), and the calibrated head is written to
head.safetensors.

Examples:
  longtail calibrate runs/digits
  longtail calibrate runs/c10 --options gamma auto
  longtail calibrate runs/c10 --method auto
  longtail calibrate runs/c10 --method halo --options target-prior prior.csv
  longtail calibrate runs/c10 --method marc --then temperature
  longtail calibrate runs/c10 --method marc --options solver sgd --views 3 --out runs/c10-sgd
  longtail calibrate train.npz --test test.npz --out calibrated
"""


@dataclass(frozen=True)
class Calibrate(Output):
    """What to calibrate, and how."""

    source: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run, or a file of saved logits and labels."""
    method: str = "marc"
    """Post-hoc method; `longtail methods` lists them."""
    options: dict[str, str] = field(default_factory=dict)
    """Settings of the method, as name value pairs."""
    then: Literal["temperature"] | None = None
    """Second step after the method: one temperature that corrects the confidence, fitted on held-out images."""
    out: Path | None = None
    """Folder of the result (default: RUN/METHOD; required for a file)."""
    overwrite: bool = False
    """Replace the folder if it exists."""

    views: int = 1
    """Run: augmented passes over the training images; 0 for clean images."""
    images_per_class: int | Literal["all", "auto"] = "auto"
    """Run: at most so many training images of every class; auto: as many as the method needs."""
    seed: int = 0
    """Run: random seed that selects these images."""
    root: str | None = None
    """Run: folder of the data set, if it has moved since training."""
    device: str = "auto"
    """Run: auto, cpu, cuda, …"""
    workers: int = WORKERS
    """Run: processes that decode images read from files."""

    labels: Path | None = None
    """File: labels of a .npy file of logits."""
    validation: Path | None = None
    """File: held-out logits and labels, on which settings are chosen."""
    test: Path | None = None
    """File: logits and labels to report on."""


def main(arguments: list[str]) -> int:
    options = parse(Calibrate, arguments, "calibrate", HELP)
    if options.source.is_dir():
        refuse(options, ("labels", "validation", "test"), options.source, "a run")
        return _calibrate_run(options)
    refuse(options, ("views", "images_per_class", "seed", "root", "device", "workers"), options.source, "saved logits")
    return _calibrate_file(options)


def _calibrate_run(options: Calibrate) -> int:
    with loading():
        from longtail.distributed.world import join
        from longtail.extraction.run import Extractor
        from longtail.runs.folder import Run, build_posthoc_for
        from longtail.tasks.calibrate_run import calibrate_run

    with join(options.device) as world:
        run = Run.open(options.source)
        run, method = _origin(options, run), build_posthoc_for(run, options.method, options.options)
        method = _then(options, method)
        world.require_alike(
            model=run.model_identity,
            method=options.method,
            options=options.options,
            views=options.views,
            images_per_class=options.images_per_class,
            seed=options.seed,
        )
        extractor = Extractor(run, world, root=options.root, workers=options.workers, display=options.display())
        folder, scores = calibrate_run(
            extractor,
            method,
            options.method,
            out=options.out,
            views=options.views,
            images_per_class=options.images_per_class,
            seed=options.seed,
            overwrite=options.overwrite,
        )
    _show(options, method, scores, folder)
    options.display().line(f"score it with: {command_on('evaluate', folder, options.root)}")
    return 0


def _then(options: Calibrate, method: PostHoc) -> PostHoc:
    from longtail.posthoc.tempered import Tempered

    return method if options.then is None else Tempered(method)


def _origin(options: Calibrate, run: Run) -> Run:
    """The run to calibrate; for a calibrated run, the run that was calibrated."""
    from longtail.runs.folder import Run

    if run.calibration is None:
        return run
    origin = Run.open(run.calibration.run)
    if origin.model_identity != run.calibration.model:
        raise UserError(f"{run.folder} is calibrated already, and {origin.folder}, where it came from, has changed")
    options.display().line(f"{run.folder} is calibrated already ({run.calibration.title}): calibrating {origin.folder}")
    return origin


def _calibrate_file(options: Calibrate) -> int:
    with loading():
        from longtail.distributed.world import join
        from longtail.methods import build_posthoc
        from longtail.outputs.readers import read_held_out, read_outputs
        from longtail.tasks.calibrate_files import calibrate_files

    if not options.source.exists():
        raise UserError(f"{options.source} does not exist; name a run folder or a file of saved logits")
    if options.out is None:
        raise UserError("name the folder of the result: --out FOLDER")
    method = _then(options, build_posthoc(options.method, options.options))
    with join("cpu") as world:
        train = read_outputs(options.source, options.labels)
        world.require_alike(method=options.method, options=options.options, samples=len(train))
        held_out = [
            read_held_out(path, split, train)
            for split, path in (("validation", options.validation), ("test", options.test))
            if path is not None
        ]
        scores = calibrate_files(
            train, method, options.out, held_out, name=options.method, world=world, overwrite=options.overwrite
        )
    _show(options, method, scores, options.out)
    if not held_out:
        options.display().line("no held-out logits were given (--test FILE), so nothing is scored")
    return 0


def _unbiased(options: Calibrate, score: Comparison) -> str:
    """What shows the gain on new images, where a run is calibrated that holds out images of every class."""
    if not options.source.is_dir() or score.missing:
        return ""
    return f"; {command_on('diagnose', options.source, options.root)} corrects for it"


def _show(options: Calibrate, method: PostHoc, scores: list[Comparison], folder: Path) -> None:
    from longtail.methods import candidate_title, describe_posthoc
    from longtail.metrics.intervals import fallen_text
    from longtail.posthoc import HALO, Auto, Tempered
    from longtail.report.terminal import comparison_table, trial_table

    display, title = options.display(), describe_posthoc(method, options.method)[0].title
    for score in scores:
        display.table(comparison_table(score.split, {"before": score.before, title: score.after}))
        if score.used:
            display.line(
                f"{title} was fitted or chosen on the {score.split} images: its scores there are higher than on new "
                f"images{_unbiased(options, score)}"
            )
        if score.missing:
            display.line(f"{score.split}: no samples of class {some_of(score.missing)}; the scores are over the others")
        if score.fallen:
            display.line(f"{score.split}: recognised less often than before: {fallen_text(score.fallen)}")
    inner = method.method if isinstance(method, Tempered) else method
    if isinstance(inner, Auto):
        display.table(trial_table(inner.trial_))
        why = "" if inner.choice_ != "softmax" else ": no method is clearly better on the held-out samples"
        display.line(f"Auto chose {candidate_title(inner.choice_)}{why}")
        inner = inner.method_
    if isinstance(inner, HALO):
        display.line(f"fitted on {inner.held_out_}")
        if inner.model_prior_ == "uniform":
            display.line(
                "the model's own logits are right for equal classes already, so the training prior is added to them "
                "first (--options model-prior train if they are not)"
            )
    result = method.result_
    state = "solved" if result.converged else "NOT solved"
    chosen = "".join(f", {name} {value:g}" for name, value in method.chosen_.items())
    display.line(f"{title}{chosen}: {state} in {result.seconds:.2f} s, {result.iterations} iterations")
    files = "" if options.source.is_dir() else f" ({', '.join(sorted(path.name for path in folder.glob('[!.]*')))})"
    display.line(f"written: {folder}{files}")
    rows = {score.split: score.to_dict() for score in scores}
    options.print_json({"out": str(folder), "result": vars(result), "chosen": method.chosen_, **rows})
