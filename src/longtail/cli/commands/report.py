"""`longtail report`: an HTML page and figures."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from longtail.cli.parsing import Output, RunData, SavedLogits, parse, refuse
from longtail.errors import UserError
from longtail.files.text import command_on

HELP = """Make a report: one HTML page that needs no network, and every figure as PNG, SVG and PDF.

The page shows what the newest calibration made better, what it costs and whether to use it; then the classes that gain
and lose, a slider over its strength, other calibrations and what `longtail diagnose` tried, confusions, confidence,
margins. Nothing is fitted if the run is calibrated. Further runs on the same classes show the effect of the stage-one
data. For saved logits give the training logits, and held-out logits with --test (see `longtail calibrate`).

Examples:
  longtail report runs/digits
  longtail report runs/c100-200 runs/c100-100 runs/c100-50 --out reports/c100
  longtail report runs/photos --serve
  longtail report train.npz --test test.npz --out reports/mine
"""


@dataclass(frozen=True)
class Report(Output):
    """What to report on."""

    sources: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folder of a finished run (more: further checkpoints), or one file of saved training logits."""
    out: Path | None = None
    """Folder of the report (default: RUN/report; required for a file)."""
    serve: bool = False
    """Instead of a report, serve a page on this machine that predicts new images before and after calibration."""
    run: tyro.conf.OmitArgPrefixes[RunData] = field(default_factory=RunData)
    file: tyro.conf.OmitArgPrefixes[SavedLogits] = field(default_factory=SavedLogits)


def main(words: list[str]) -> int:
    options = parse(Report, words, "longtail report", HELP)
    if not options.sources:
        raise UserError("name a run folder or a file of saved logits: longtail report RUN")
    from longtail.report import require_packages

    require_packages("a report", "matplotlib", "jinja2", "plotly")
    if options.serve:
        return _serve(options)
    source, display = options.sources[0], options.display()
    page = _report_file(options) if source.is_file() else _report_runs(options)
    display.line(f"written: {page} (figures in {page.parent / 'figures'}); open it in a browser")
    if not source.is_file():
        display.line(f"next: {command_on('report', source, None, '--serve')}  (a page that predicts new images)")
    options.print_json({"page": str(page)})
    return 0


def _serve(options: Report) -> int:
    from longtail.report.serve import Server, predictors_of
    from longtail.runs.folder import Run

    if len(options.sources) > 1 or options.sources[0].is_file():
        raise UserError("--serve takes the folder of one run")
    with Server(predictors_of(Run.open(options.sources[0]))) as server:
        options.display().line(f"open {server.address} in a browser (Ctrl-C ends it)")
        options.print_json({"address": server.address})
        sys.stdout.flush()
        server.serve_forever()
    return 0


def _report_runs(options: Report) -> Path:
    from longtail.report.build import report_run
    from longtail.runs.folder import Run

    refuse(options.file, "saved logits", options.sources[0], "a run")
    for source in options.sources:
        if (runs := sorted((source / "runs").glob("*/run.json"))) and not (source / "run.json").is_file():
            raise UserError(f"{source} is a comparison; report on one of its runs: longtail report {runs[0].parent}")
    opened = [Run.open(source) for source in options.sources]
    out = options.out or options.sources[0] / "report"
    return report_run(opened, out, root=options.run.root, workers=options.run.workers, display=options.display())[0]


def _report_file(options: Report) -> Path:
    from longtail.report.build import report_files

    (source, *more), test = options.sources, options.file.test
    refuse(options.run, "run folders", source, "saved logits")
    if more:
        raise UserError("a report of saved logits takes one file; give held-out logits with --test")
    if options.out is None or test is None:
        raise UserError("a report of saved logits needs --test FILE (held-out logits) and --out FOLDER")
    files = source, test, options.file.validation
    return report_files(*files, options.out, options.display(), label_column=options.file.label_column)[0]
