"""One self-contained HTML page: the numbers as JSON, drawn in the browser by the bundled Plotly."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from longtail import __version__
from longtail.files.atomic import write_text
from longtail.methods import candidate_title
from longtail.metrics.intervals import Interval, show_difference
from longtail.metrics.margins import State
from longtail.metrics.scores import SHOT_LIMITS, Metrics, shot_names
from longtail.metrics.table import SCORES
from longtail.posthoc.costs import cost_text
from longtail.report.summary import Confusion, Point, Summary, grouped_confusion, verdict
from longtail.tasks.diagnose import DiagnosisFile

ASSETS = Path(__file__).parent / "assets"
THUMBNAIL = 64
ReadImage = Callable[[int], Image.Image]


@dataclass(frozen=True)
class Context:
    """The texts of a page.

    Args:
        title: what was calibrated, in a few words.
        command: the command that calibrates it, to which `--strength` is added; empty if there is none.
        facts: lines at the end of the page.
        checkpoints: rows (stage-one data, before, after) when several models were calibrated.
        read_image: returns the image of a held-out sample, if there are images.
        caution: sentence about the scores, if they are not those on new images.
        diagnosis: the result of `longtail diagnose`, if there is one.
    """

    title: str
    command: str
    facts: dict[str, str] = field(default_factory=dict)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    read_image: ReadImage | None = None
    caution: str = ""
    diagnosis: DiagnosisFile | None = None


def write_page(summary: Summary, context: Context, path: Path, numbers: dict[str, Any] | None = None) -> Path:
    """Render the page of these numbers (default: those of `page_data`)."""
    from plotly.offline import get_plotlyjs

    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined)
    numbers = numbers or page_data(summary, context)
    data = json.dumps(numbers, allow_nan=False, separators=(",", ":"))
    text = environment.get_template("page.html").render(
        title=context.title,
        verdict=numbers["verdict"].replace(" %", "\N{NO-BREAK SPACE}%"),
        about=_about(summary, context),
        instead=_instead(summary, context.diagnosis),
        imbalance=_imbalance(summary),
        diagnosis=context.diagnosis,
        advice=_advice(summary),
        points=bool(summary.points),
        worst=numbers["worst"],
        new=numbers["new"],
        pictures=any(item["pictures"] for item in numbers["worst"]),
        version=__version__,
        facts=context.facts,
        rows=len(numbers["confusion"]["names"]),
        classes=len(summary.class_names),
        fallen=numbers["fallen"],
        ece=[SCORES["ece"].show(state.metrics.ece) for state in (summary.before, summary.after)],
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        script=(ASSETS / "page.js").read_text(encoding="utf-8"),
        library=get_plotlyjs(),
        # Escaped, so that text in the JSON cannot end the script element.
        data=data.replace("<", "\\u003c"),
    )
    return write_text(path, text)


def _about(summary: Summary, context: Context) -> str:
    """Which images the scores are of, and what their names mean."""
    images = f"{len(summary.labels):,} {summary.split} images, which the network was not trained on."
    cost = "" if summary.cost is None else f"Costs: {cost_text(*summary.cost)}."
    words = f"{summary.tail.title()}-shot: {SHOT_LIMITS[summary.tail]} training images. " if summary.tail else ""
    words += "At the training prior: with classes as frequent as in training."
    tried = context.diagnosis.tried if context.caution and context.diagnosis and summary.strength == 1 else []
    gains = [show_difference(one.gain) for one in tried if one.method == summary.methods[summary.after.title]]
    expected = f"There longtail diagnose expects {gains[0]} points of balanced accuracy." if gains else ""
    return " ".join(filter(None, (f"Measured on {images}", context.caution, expected, cost, words)))


def _instead(summary: Summary, diagnosis: DiagnosisFile | None) -> str:
    """What `diagnose` recommends, if it is another method and its gain is significant; otherwise empty."""
    tried = {one.method: one for one in diagnosis.tried} if diagnosis else {}
    best = tried.get(diagnosis.method) if diagnosis else None
    if best is None or best.method == summary.methods[summary.after.title] or (best.gain.low or 0) <= 0:
        return ""
    return (
        f"longtail diagnose recommends {candidate_title(best.method)} instead: {show_difference(best.gain)} points of "
        f"balanced accuracy expected (--method {best.method})."
    )


def _imbalance(summary: Summary) -> str:
    """What an imbalanced split does to the scores that count images; empty for a balanced one."""
    if not summary.imbalanced:
        return ""
    most, fewest = summary.sizes
    return (
        f"The {summary.split} split is imbalanced ({most:,} to {fewest:,} images per class): large classes decide "
        "plain top-1, NLL, Brier and ECE; balanced accuracy and macro F1 count every class alike."
    )


def _advice(summary: Summary) -> str:
    """How to choose an operating point with the existing splits."""
    if summary.split == "validation":
        return "Choose by the validation scores; without a test split nothing is left to check the choice on."
    if any(point.validation for point in summary.points):
        return f"Choose by the validation line; the {summary.split} line is for the record."
    return f"Without validation images to choose by, a point chosen by {summary.split} scores looks better than it is."


def page_data(summary: Summary, context: Context) -> dict[str, Any]:
    """The data of the page as plain values; shares are per cent with one decimal."""
    order = summary.order
    shots = shot_names(summary.class_counts)
    return {
        "split": summary.split,
        "verdict": verdict(summary),
        "intervals": {"balanced": _bounds(summary.gain), "natural": _bounds(summary.price)},
        "figures": [summary.tail or "macro_f1", "balanced", "natural"],
        "scores": [
            {"name": score.name, "heading": score.heading, "lower": score.lower_is_better, "digits": score.digits}
            for score in SCORES.values()
        ],
        "classes": {
            "names": [summary.class_names[label] for label in order],
            "counts": summary.class_counts[order].tolist(),
            "shots": [shots[label] for label in order],
        },
        "states": [_state(state, order) for state in (summary.before, summary.after, *summary.others.values())],
        "changes": {name: _percents(getattr(summary.changes, name)[order]) for name in ("value", "low", "high")},
        "confusion": _confusion(summary),
        "worst": [_confused(summary, context, pair, summary.before) for pair in summary.confusions],
        "new": [_confused(summary, context, pair, summary.after) for pair in summary.new_confusions],
        "methods": _methods(summary, context.diagnosis),
        "points": [{"strength": point.strength, **_point(point, order)} for point in summary.points],
        "strength": summary.strength,
        "fallen": [str(one) for one in summary.fallen],
        "checkpoints": context.checkpoints,
        "command": context.command,
    }


def _point(point: Point, order: np.ndarray) -> dict[str, Any]:
    return {
        "scores": _scores(point.metrics),
        "validation": _scores(point.validation) if point.validation else None,
        "cost": point.cost,
        "validationCost": point.validation_cost,
        "accuracy": _percents(np.array(point.metrics.per_class, dtype=float)[order]),
    }


def _methods(summary: Summary, diagnosis: DiagnosisFile | None) -> list[dict[str, Any]]:
    """Every method once: what was fitted, with its scores, and what `diagnose` tried, with the gain it measured."""
    tried = {one.method: one for one in diagnosis.tried} if diagnosis else {}

    def found_by_diagnose(name: str) -> dict[str, str]:
        one = tried.pop(name, None)
        if one is None:
            return {"gain": "", "natural": ""}
        gain = "" if name == "softmax" else show_difference(one.gain)
        return {"gain": gain, "natural": SCORES["natural"].show(one.natural)}

    rows = [
        {
            "title": state.title,
            "scores": _scores(state.metrics),
            "parameters": state.parameters,
            "correlation": round(state.correlation["margins"], 2),
            **found_by_diagnose(summary.methods[state.title]),
        }
        for state in (summary.before, summary.after, *summary.others.values())
    ]
    nothing = {"scores": None, "parameters": None, "correlation": None}
    return [*rows, *({"title": candidate_title(name), **nothing, **found_by_diagnose(name)} for name in list(tried))]


def _bounds(change: Interval) -> str:
    """The interval of a change in points."""
    return show_difference(change).partition(" ")[2]


def _percents(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else round(100 * float(value), 1) for value in values]


def _numbers(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 3) for value in values]


def _scores(metrics: Metrics) -> dict[str, float | None]:
    values: dict[str, float | None] = {name: getattr(metrics, name) for name in SCORES}
    return {
        name: None if value is None else round(SCORES[name].scaled(value), SCORES[name].digits)
        for name, value in values.items()
    }


def _state(state: State, order: np.ndarray) -> dict[str, Any]:
    share, confidence, accuracy = state.reliability
    return {
        "title": state.title,
        "scores": _scores(state.metrics),
        "parameters": state.parameters,
        "accuracy": _percents(np.array(state.metrics.per_class, dtype=float)[order]),
        "f1": _percents(np.array(state.metrics.f1_per_class, dtype=float)[order]),
        "logits": _numbers(state.means.logits[order]),
        "margins": _numbers(state.means.margins[order]),
        "correlation": {name: round(value, 2) for name, value in state.correlation.items()},
        "reliability": {
            "share": _percents(share),
            "confidence": _numbers(confidence),
            "accuracy": _numbers(accuracy),
        },
    }


def _confusion(summary: Summary) -> dict[str, Any]:
    before, groups = grouped_confusion(summary.before.metrics, summary.order)
    after, _ = grouped_confusion(summary.after.metrics, summary.order)
    names, ticks = [], []
    for group in groups:
        first, last = (summary.class_names[summary.order[position]] for position in (group.start, group.stop - 1))
        alone = group.stop - group.start == 1
        names.append(first if alone else f"{first} … {last}")
        ticks.append(first if alone else f"{first} …")
    tables = {name: [_percents(row) for row in table] for name, table in (("before", before), ("after", after))}
    return {"names": names, "ticks": ticks, **tables}


def _confused(summary: Summary, context: Context, confusion: Confusion, state: State) -> dict[str, Any]:
    """A pair of classes with some of the images that are confused."""
    confused = (summary.labels == confusion.truth) & (state.predictions == confusion.predicted)
    pictures = []
    if context.read_image:
        pictures = [thumbnail(context.read_image(int(index))) for index in np.flatnonzero(confused)[:4]]
    return {
        "truth": summary.class_names[confusion.truth],
        "taken_for": summary.class_names[confusion.predicted],
        "before": round(100 * confusion.before, 1),
        "after": round(100 * confusion.after, 1),
        "accuracy": [round(100 * value, 1) for value in (confusion.accuracy_before, confusion.accuracy_after)],
        "pictures": pictures,
    }


def thumbnail(picture: Image.Image) -> str:
    """A small PNG as a data URL."""
    scale = THUMBNAIL / max(picture.size)
    size = max(round(picture.width * scale), 1), max(round(picture.height * scale), 1)
    resample = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    buffer = io.BytesIO()
    picture.resize(size, resample).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
