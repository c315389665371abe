"""Make a table or figure of the paper: train what is not trained yet, calibrate, write the result.

OUT/RECIPE/   a comparison as `longtail compare RECIPE --out OUT/RECIPE` leaves it; items share its runs
OUT/NAME/     README.md with the table or figure, results.json with its numbers, figures
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from longtail.config import TrainConfig, describe, differences
from longtail.core.files import write_json, write_text
from longtail.core.formats import FORMAT
from longtail.core.provenance import provenance
from longtail.extraction.run import Extractor
from longtail.metrics.state import State
from longtail.metrics.table import SCORES, SHOTS
from longtail.recipes import RECIPES
from longtail.report import f1, paper_tables
from longtail.report.build import calibrated_elsewhere
from longtail.report.figures import write_figures
from longtail.report.summary import Summary, fitted, summarise
from longtail.report.work import Work, require_data, take_released
from longtail.runs.folder import build_posthoc_for
from longtail.tasks.table_rows import Row

Made = tuple[list[str], Any]  # lines of Markdown, and the numbers behind them
MEANS = ("logits", "margins")


def reproduce(work: Work) -> Path:
    """Make an item; returns its page."""
    require_data(work)
    if work.released:
        take_released(work)
    body, numbers = MAKERS[work.item.kind](work)
    data = {recipe: _departures(recipe, config) for recipe, config in work.configs.items()}
    origin = {**data, **provenance()}
    if data:
        origin["seeds"] = _seeds(work)
    beside = [f"- {key}: {value}" for key, value in origin.items()]
    others = [recipe for recipe, config in work.configs.items() if config.data != RECIPES[recipe].data]
    if others:
        body = [
            f"**Made from other data in the place of {', '.join(others)}: do not compare it with the paper.**",
            "",
            *body,
        ]
    if instead := [recipe for recipe in work.configs if recipe not in work.item.recipes]:
        body = [f"**On {', '.join(instead)} instead of the paper's {', '.join(work.item.recipes)}.**", "", *body]
    title = f"# {work.item.where}: {work.item.what}"
    write_json(work.folder / "results.json", {"format": FORMAT, "item": work.name, **origin, "numbers": numbers})
    return write_text(work.folder / "README.md", "\n".join([title, "", *body, "", *beside]) + "\n")


def _departures(recipe: str, config: TrainConfig) -> str:
    """The training runs, and every setting that differs from the recipe."""
    changed = differences(RECIPES[recipe], config)
    return describe(config) + (f" (departs from the recipe: {'; '.join(changed)})" if changed else "")


def _seeds(work: Work) -> str:
    """The seeds of an item; by recipe where they differ."""
    shown = {
        recipe: str(seeds[0]) if work.item.figures else ", ".join(map(str, seeds))
        for recipe, seeds in work.seeds.items()
    }
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return "; ".join(f"{recipe}: {seeds}" for recipe, seeds in shown.items())


def _formulas(work: Work) -> Made:
    return paper_tables.formulas()


def _accuracy(work: Work) -> Made:
    tables = {recipe: work.rows(recipe) for recipe in work.configs}
    return [*paper_tables.accuracy(tables), "", *_reading(work)], _top(tables)


def _parameters(work: Work) -> Made:
    tables = {recipe: work.rows(recipe) for recipe in work.configs}
    return [*paper_tables.parameters(tables), "", *_reading(work)], _top(tables)


def _top(tables: dict[str, list[Row]]) -> dict[str, Any]:
    """Recipe → method → the seeds' own values of every score, and the numbers it trains."""
    return {
        recipe: {row.method: {"seeds": row.seeds, **row.values, "parameters": row.parameters} for row in rows}
        for recipe, rows in tables.items()
    }


def _reading(work: Work) -> list[str]:
    where = ", ".join(f"`{recipe}/table.md`" for recipe in work.configs)
    return [
        "Per cent on the test images; with three seeds or more, mean ± 95 % interval over seeds. The paper gives one "
        f"number. All scores, differences and the seeds' own values: {where} in the folder above this one."
    ]


def _stage_one(work: Work) -> Made:
    for recipe in work.configs:
        work.compared(recipe, ("softmax",), work.seeds[recipe])
    target = next(iter(work.configs))
    scores: dict[str, list[tuple[float, float]]] = {}
    for recipe, config in work.configs.items():
        for seed in (seed for seed in work.seeds[recipe] if seed in work.seeds[target]):
            runs = work.run(recipe, seed), work.run(target, seed)
            both = calibrated_elsewhere(*runs, "test", config.root, config.workers, work.display)
            scores.setdefault(recipe, []).append((both[0].top1, both[1].top1))
    note = f"Top-1 accuracy in per cent; MARC is fitted on the training images of {target} in every row."
    return [*paper_tables.stage_one(scores), "", note], scores


def _f1(work: Work) -> Made:
    scores = {}
    for recipe in work.configs:
        results = work.compared(recipe, ("softmax", "marc"), work.seeds[recipe])
        values = {
            method: [result["metrics"]["macro_f1"] for result in results if result["method"] == method]
            for method in ("softmax", "marc")
        }
        scores[recipe] = f1.F1(values["softmax"], values["marc"])
    files = f1.write(scores, work.folder)
    rows = [
        [name, *(", ".join(SCORES["macro_f1"].show(value) for value in own) for own in (score.before, score.after))]
        for name, score in scores.items()
    ]
    table = paper_tables.lines_of(["Macro F1, one per seed", "before", "after MARC"], rows)
    return [f"![{f1.NAME}]({files[0].name})", "", *table], {name: vars(score) for name, score in scores.items()}


def _summary(work: Work) -> Summary:
    """The report's numbers of the Softmax run of the first seed; DisAlign is fitted where it is drawn."""
    (recipe, config), *_ = work.configs.items()
    seed, *_ = work.seeds[recipe]
    work.compared(recipe, ("softmax",), (seed,))
    run = work.run(recipe, seed)
    extractor = Extractor(run, root=config.root, workers=config.workers, display=work.display)
    train, test = extractor.outputs("train", views=1), extractor.outputs("test")
    validation = extractor.outputs("validation") if "validation" in run.split_sizes else None

    def of(name: str, title: str) -> Any:
        return fitted(build_posthoc_for(run, name, {}), title, name, train, test, validation)

    others = [of("disalign", "DisAlign")] if "disalign-beside-marc" in work.item.figures else []
    others += [of("halo", "HALO")] if others and validation is not None else []
    return summarise(train, test, validation=validation, after=of("marc", "MARC"), others=others)


def _drawn(work: Work, summary: Summary) -> list[str]:
    files = write_figures(summary, work.folder, work.item.figures)
    return [line for file in files if file.suffix == ".png" for line in (f"![{file.stem}]({file.name})", "")]


def _drawing(work: Work) -> Made:
    summary = _summary(work)
    states = {state.title: state for state in (summary.before, *summary.others.values(), summary.after)}
    columns = ["", "Balanced accuracy", *(f"rank correlation of class size and mean {name[:-1]}" for name in MEANS)]
    rows = [
        [title, SCORES["balanced"].show(state.metrics.balanced), *(f"{state.correlation[name]:+.2f}" for name in MEANS)]
        for title, state in states.items()
    ]
    numbers = {title: _numbers(state) for title, state in states.items()}
    return [*_drawn(work, summary), *paper_tables.lines_of(columns, rows)], numbers


def _numbers(state: State) -> dict[str, Any]:
    """The numbers in the figures, class by class."""
    means = {name: [_plain(value) for value in getattr(state.means, name)] for name in MEANS}
    confusion = state.metrics.matrix().tolist()
    return {**means, "accuracy": state.metrics.per_class, "confusion": confusion, "correlation": state.correlation}


def _plain(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _gamma(work: Work) -> Made:
    summary = _summary(work)
    names = ("balanced", "top1", *SHOTS)
    points = {point.gamma: {name: getattr(point.metrics, name) for name in names} for point in summary.points}
    rows = [[f"{gamma:g}", *(SCORES[name].show(scores[name]) for name in names)] for gamma, scores in points.items()]
    table = paper_tables.lines_of(["gamma", *(SCORES[name].heading for name in names)], rows)
    return [*_drawn(work, summary), *table], [{"gamma": gamma, **scores} for gamma, scores in points.items()]


MAKERS: dict[str, Callable[[Work], Made]] = {
    "formulas": _formulas,
    "accuracy": _accuracy,
    "parameters": _parameters,
    "stage-one": _stage_one,
    "f1": _f1,
    "drawing": _drawing,
    "gamma": _gamma,
}
