"""Make a table or figure of the paper: train what is not trained yet, calibrate, write the result.

OUT/RECIPE/   a comparison as `longtail compare RECIPE --out OUT/RECIPE` leaves it; items share its runs
OUT/NAME/     README.md with the table or figure, results.json with its numbers, figures
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from longtail.config import TrainConfig, describe, differences
from longtail.files.atomic import write_json, write_text
from longtail.files.records import FORMAT, provenance
from longtail.methods import POSTHOC_METHODS
from longtail.metrics.intervals import over_seeds
from longtail.metrics.margins import State
from longtail.metrics.table import SCORES, SHOTS
from longtail.outputs.record import Outputs
from longtail.paper.figures import accuracy_against_gamma, disalign_beside_marc, f1_over_data_sets
from longtail.paper.items import AFTER_STAGE_ONE, FORMULAS, NUMBERS, SCORES_SHOWN
from longtail.paper.work import Work, require_data, take_released
from longtail.posthoc.inputs import fit_outputs
from longtail.posthoc.marc import MARC
from longtail.recipes import RECIPES
from longtail.report.build import calibrated_elsewhere
from longtail.report.figures import FIGURES, drawing, save, write_figures
from longtail.report.summary import Calibrated, scores, summarise
from longtail.runs.folder import Run, build_posthoc_for
from longtail.tasks.tables import FAMILIES, Row, markdown_table, show_interval

Made = tuple[list[str], Any]  # lines of Markdown, and the numbers behind them
MEANS = ("logits", "margins")
DISALIGN_FIGURE = "disalign-beside-marc"


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
    footer = [f"- {key}: {value}" for key, value in origin.items()]
    others = [recipe for recipe, config in work.configs.items() if config.data != RECIPES[recipe].data]
    if others:
        body = [
            f"**Made from other data instead of {', '.join(others)}: do not compare it with the paper.**",
            "",
            *body,
        ]
    if instead := [recipe for recipe in work.configs if recipe not in work.item.recipes]:
        body = [f"**On {', '.join(instead)} instead of the paper's {', '.join(work.item.recipes)}.**", "", *body]
    title = f"# {work.item.where}: {work.item.what}"
    write_json(work.folder / "results.json", {"format": FORMAT, "item": work.name, **origin, "numbers": numbers})
    return write_text(work.folder / "README.md", "\n".join([title, "", *body, "", *footer]) + "\n")


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
    """Table 1, and the class of each method."""
    methods = {name: POSTHOC_METHODS[name] for name in FORMULAS}
    rows = [
        [method.title, FORMULAS[name], method.trains, f"`longtail.posthoc.{method.path}`"]
        for name, method in methods.items()
    ]
    return markdown_table(["Method", "calibrated logit of class j", "trains", "class"], rows), FORMULAS


def _accuracy(work: Work) -> Made:
    """Methods by family; for each recipe and score one column with our number and one with the paper's."""
    tables = _tables(work)
    scores = [(recipe, score) for recipe in tables for score in _shown_scores(recipe)]
    columns = ["Method"]
    for recipe, score in scores:
        columns += [f"{recipe}: {SCORES[score].heading}", "in the paper"]
    methods = {method: row for rows in tables.values() for method, row in rows.items()}
    families = list(FAMILIES)
    lines = []
    for method, first in sorted(methods.items(), key=lambda item: families.index(item[1].family)):
        cells = [first.title]
        for recipe, score in scores:
            row = tables[recipe].get(method)
            ours = show_interval(SCORES[score], row.scores[score]) if row else ""
            cells += [ours, _in_paper(recipe, method, score)]
        lines.append(cells)
    return [*markdown_table(columns, lines), "", *_reading(work)], _seed_scores(tables)


def _parameters(work: Work) -> Made:
    """How many numbers each method trains, as a formula and as a number, and its accuracy."""
    tables = _tables(work)
    columns = ["Method", "trains"]
    for recipe in tables:
        columns += [f"{recipe}: numbers", SCORES["top1"].heading, "in the paper"]
    lines = []
    for method, first in next(iter(tables.values())).items():
        cells = [first.title, trains(method)]
        for recipe, rows in tables.items():
            row = rows[method]
            numbers = "" if row.parameters is None else f"{row.parameters:,}"
            cells += [numbers, show_interval(SCORES["top1"], row.scores["top1"]), _in_paper(recipe, method, "top1")]
        lines.append(cells)
    return [*markdown_table(columns, lines), "", *_reading(work)], _seed_scores(tables)


def _tables(work: Work) -> dict[str, dict[str, Row]]:
    """Recipe → method → its row."""
    return {recipe: {row.method: row for row in work.rows(recipe)} for recipe in work.configs}


def _in_paper(recipe: str, method: str, score: str) -> str:
    numbers = NUMBERS.get(recipe, {}).get(method, ())
    shown = dict(zip(SCORES_SHOWN[len(numbers)], numbers, strict=True)) if numbers else {}
    return f"{shown[score]:.1f}" if score in shown else "–"


def _shown_scores(recipe: str) -> tuple[str, ...]:
    """The scores that the paper reports for a data set; top-1 if it reports none."""
    return SCORES_SHOWN[max((len(numbers) for numbers in NUMBERS.get(recipe, {}).values()), default=1)]


def trains(label: str) -> str:
    """The numbers that a method of a comparison trains in stage two, by its label.

    >>> trains("marc-solver=sgd"), trains("cbs+marc"), trains("softmax")
    ('2K', '2K', 'network')
    """
    last = label.rpartition("+")[2]
    names = [name for name in POSTHOC_METHODS if last == name or last.startswith(f"{name}-")]
    return POSTHOC_METHODS[max(names, key=len)].trains if names else "network"


def _seed_scores(tables: dict[str, dict[str, Row]]) -> dict[str, Any]:
    """Recipe → method → every score seed by seed, and the numbers it trains."""
    return {
        recipe: {
            method: {"seeds": row.seeds, **row.values, "parameters": row.parameters} for method, row in rows.items()
        }
        for recipe, rows in tables.items()
    }


def _reading(work: Work) -> list[str]:
    where = ", ".join(f"`{recipe}/table.md`" for recipe in work.configs)
    return [
        "Per cent on the test images; with three seeds or more, mean ± 95 % interval over seeds. The paper gives one "
        f"number. All scores, differences and the values of each seed: {where} in the folder above this one."
    ]


def _stage_one(work: Work) -> Made:
    """For each recipe of stage one, accuracy before and after MARC on the first recipe, seed by seed."""
    for recipe in work.configs:
        work.compared(recipe, ("softmax",), work.seeds[recipe])
    target = next(iter(work.configs))
    accuracies: dict[str, list[tuple[float, float]]] = {}
    for recipe, config in work.configs.items():
        for seed in (seed for seed in work.seeds[recipe] if seed in work.seeds[target]):
            runs = work.run(recipe, seed), work.run(target, seed)
            before, after = calibrated_elsewhere(*runs, "test", config.root, config.workers, work.display)
            accuracies.setdefault(recipe, []).append((before.top1, after.top1))
    rows = []
    for recipe, pairs in accuracies.items():
        means = [show_interval(SCORES["top1"], over_seeds(list(values))) for values in zip(*pairs, strict=True)]
        paper = f"{AFTER_STAGE_ONE[recipe]:.1f}" if recipe in AFTER_STAGE_ONE else "–"
        rows.append([recipe, *means, paper])
    table = markdown_table(["Stage one on", "Softmax", "after MARC", "in the paper"], rows)
    note = f"Top-1 accuracy in per cent; MARC is fitted on the training images of {target} in every row."
    return [*table, "", note], accuracies


def _f1(work: Work) -> Made:
    """Macro F1 of every recipe before and after MARC."""
    f1: dict[str, dict[str, list[float]]] = {}
    for recipe in work.configs:
        results = work.compared(recipe, ("softmax", "marc"), work.seeds[recipe])
        f1[recipe] = {
            state: [result["metrics"]["macro_f1"] for result in results if result["method"] == method]
            for state, method in (("before", "softmax"), ("after", "marc"))
        }
    rows = [
        [recipe, *(", ".join(SCORES["macro_f1"].show(value) for value in values) for values in states.values())]
        for recipe, states in f1.items()
    ]
    table = markdown_table(["Macro F1, one per seed", "before", "after MARC"], rows)
    return [*_saved(work, "f1-over-data-sets", f1_over_data_sets, f1), *table], f1


def _outputs(work: Work) -> tuple[Run, Outputs, Outputs, Outputs | None]:
    """The Softmax run of the first seed and its training, test and validation outputs."""
    (recipe, config), *_ = work.configs.items()
    seed, *_ = work.seeds[recipe]
    work.compared(recipe, ("softmax",), (seed,))
    run = work.run(recipe, seed).using(root=config.root, workers=config.workers, display=work.display)
    validation = run.outputs("validation") if "validation" in run.split_sizes else None
    return run, run.outputs("train", views=1), run.outputs("test"), validation


def _drawing(work: Work) -> Made:
    """Figures of a report on MARC; DisAlign and HALO are fitted where they are drawn."""
    run, train, test, validation = _outputs(work)
    beside = DISALIGN_FIGURE in work.item.figures
    names = ["marc", *(["disalign"] if beside else []), *(["halo"] if beside and validation else [])]
    calibrated = []
    for name in names:
        method = build_posthoc_for(run, name, {})
        fit_outputs(method, train, validation)
        logits = np.asarray(method.transform(test))
        calibrated.append(Calibrated(POSTHOC_METHODS[name].title, logits, method.n_parameters_))
    summary = summarise(test, validation, calibrated)
    pictures = _saved(work, DISALIGN_FIGURE, disalign_beside_marc, summary) if beside else []
    drawn = write_figures(summary, work.folder, [name for name in work.item.figures if name in FIGURES])
    pictures += [line for file in drawn if file.suffix == ".png" for line in (f"![{file.stem}]({file.name})", "")]
    states = {state.title: state for state in (summary.before, *summary.others.values(), summary.after)}
    columns = ["", "Balanced accuracy", *(f"rank correlation of class size and mean {name[:-1]}" for name in MEANS)]
    rows = [
        [title, SCORES["balanced"].show(state.metrics.balanced), *(f"{state.correlation[name]:+.2f}" for name in MEANS)]
        for title, state in states.items()
    ]
    return [*pictures, *markdown_table(columns, rows)], {title: _class_numbers(one) for title, one in states.items()}


def _saved(work: Work, name: str, draw: Callable[[Any], Figure], numbers: Any) -> list[str]:
    """Draw a figure in every format; returns the lines that show it."""
    with drawing():
        picture, *_ = save(draw(numbers), work.folder, name)
    return [f"![{name}]({picture.name})", ""]


def _class_numbers(state: State) -> dict[str, Any]:
    """The numbers in the figures, class by class; None for the mean of a class without samples."""
    means = {
        name: [float(value) if np.isfinite(value) else None for value in getattr(state.means, name)] for name in MEANS
    }
    confusion = state.metrics.matrix().tolist()
    return {**means, "accuracy": state.metrics.per_class, "confusion": confusion, "correlation": state.correlation}


def _gamma(work: Work) -> Made:
    _, train, test, _ = _outputs(work)
    points = {gamma: scores(np.asarray(marc.transform(test)), test) for gamma, marc in MARC().fit_path(train).items()}
    names = ("balanced", "top1", *SHOTS)
    numbers = [{"gamma": gamma, **{name: getattr(one, name) for name in names}} for gamma, one in points.items()]
    rows = [[f"{point['gamma']:g}", *(SCORES[name].show(point[name]) for name in names)] for point in numbers]
    table = markdown_table(["gamma", *(SCORES[name].heading for name in names)], rows)
    return [*_saved(work, "accuracy-against-gamma", accuracy_against_gamma, points), *table], numbers


MAKERS: dict[str, Callable[[Work], Made]] = {
    "formulas": _formulas,
    "accuracy": _accuracy,
    "parameters": _parameters,
    "stage-one": _stage_one,
    "f1": _f1,
    "drawing": _drawing,
    "gamma": _gamma,
}
