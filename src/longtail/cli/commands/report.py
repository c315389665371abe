"""`longtail report`: an HTML page and figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from longtail.cli.parsing import Output, parse, refuse
from longtail.core.machine import WORKERS
from longtail.errors import UserError

if TYPE_CHECKING:
    from longtail.runs.folder import Run

HELP = """Make a report: one HTML page that needs no network, and every figure as PNG, SVG and PDF.

For a run folder: mean logits and margins per class before and after MARC, class-wise accuracy, confusion
matrices, F1, DisAlign compared with MARC, reliability, the classes that gain and lose most, the most
frequent confusions with images, and a slider over operating points with the command that applies the chosen
one. Further runs on the same classes show the effect of the stage-one data.

With --f1 only one figure: macro F1 before and after, one pair of bars per run; the runs may be on any data sets.

For saved logits: a file with training logits, and held-out logits with --test (see `longtail calibrate`).

Examples:
  longtail report runs/digits
  longtail report runs/c100-200 runs/c100-100 runs/c100-50 --out reports/c100
  longtail report --f1 runs/c10-100 runs/c10-200 runs/c100-100 --out reports/f1
  longtail report train.npz --test test.npz --out reports/mine
"""


@dataclass(frozen=True)
class Report(Output):
    """What to report on."""

    sources: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folder of a finished run (more: further checkpoints), or one file of saved training logits."""
    out: Path | None = None
    """Folder of the report (default: RUN/report; required for a file)."""
    test: Path | None = None
    """File: held-out logits and labels to report on."""
    validation: Path | None = None
    """File: held-out logits and labels on which the operating point is chosen."""
    f1: bool = False
    """Runs: only the figure of macro F1 over data sets, into --out."""
    root: str | None = None
    """Run: folder of the data set, if it has moved since training."""
    workers: int = WORKERS
    """Run: processes that decode images read from files."""


def main(arguments: list[str]) -> int:
    options = parse(Report, arguments, "report", HELP)
    if not options.sources:
        raise UserError("name a run folder or a file of saved logits: longtail report RUN")
    if options.f1:
        return _f1(options)
    from longtail.report.extra import PAGE, require

    require("a report", PAGE)
    page = _of_file(options) if options.sources[0].is_file() else _of_runs(options)
    options.display().line(f"written: {page} (figures in {page.parent / 'figures'})")
    options.print_json({"page": str(page)})
    return 0


def _open(options: Report) -> list[Run]:
    from longtail.runs.folder import Run

    refuse(options, ("test", "validation"), options.sources[0], "a run")
    for source in options.sources:
        if (found := sorted((source / "runs").glob("*/run.json"))) and not (source / "run.json").is_file():
            raise UserError(f"{source} is a comparison; report on one of its runs: longtail report {found[0].parent}")
    return [Run.open(source) for source in options.sources]


def _f1(options: Report) -> int:
    from longtail.report.f1 import NAME, f1_of_runs

    runs = _open(options)
    if options.out is None:
        raise UserError("--f1 draws several runs: name the folder of the figure with --out FOLDER")
    display = options.display()
    scores = f1_of_runs(runs, options.out, root=options.root, workers=options.workers, display=display)
    display.line(f"written: {options.out / NAME}.png (also SVG, PDF and JSON)")
    options.print_json({name: vars(score) for name, score in scores.items()})
    return 0


def _of_runs(options: Report) -> Path:
    from longtail.report.build import report_run

    runs = _open(options)
    out = options.out or options.sources[0] / "report"
    return report_run(runs, out, root=options.root, workers=options.workers, display=options.display())[0]


def _of_file(options: Report) -> Path:
    from longtail.core.text import command_on
    from longtail.outputs.readers import read_held_out, read_outputs
    from longtail.posthoc.marc import MARC
    from longtail.report.build import write_report
    from longtail.report.page import Context
    from longtail.report.summary import fitted

    (source, *more) = options.sources
    if more:
        raise UserError("a report of saved logits takes one file; give held-out logits with --test")
    if options.out is None or options.test is None:
        raise UserError("a report of saved logits needs --test FILE (held-out logits) and --out FOLDER")
    train = read_outputs(source)
    held_out = read_held_out(options.test, "test", train)
    validation = read_held_out(options.validation, "validation", train) if options.validation else None
    command = command_on("calibrate", source, None, "--test", str(options.test), "--out", "calibrated", "--overwrite")
    context = Context(source.stem, command, {"training logits": str(source), "test logits": str(options.test)})
    after = fitted(MARC(), "MARC", "marc", train, held_out, validation)
    return write_report(train, held_out, validation, after, context, options.out, options.display())[0]
