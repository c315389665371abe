import resource
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from longtail import Outputs
from longtail.errors import UserError
from longtail.report import figures
from longtail.report.figures import FIGURES, drawing, write_figures

from .conftest import summary_of


def test_every_figure_is_written_in_three_formats_and_is_not_empty(real_summary, tmp_path):
    files = write_figures(real_summary, tmp_path)
    assert len(files) == 3 * len(FIGURES)
    for file in files:
        assert file.stat().st_size > 3000, file
        if file.suffix == ".png":
            pixels = np.asarray(Image.open(file).convert("L"))
            assert pixels.std() > 5
            assert min(pixels.shape) > 300


@pytest.mark.parametrize("kind", figures.UNDATED)
def test_a_figure_without_space_is_one_error_and_leaves_nothing(kind, real_summary, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "UNDATED", {kind: figures.UNDATED[kind]})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=rf"cannot write .*class-means\.{kind}: File too large"):
            write_figures(real_summary, tmp_path, ["class-means"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_the_same_figure_is_the_same_file(real_summary, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", {"class-means": FIGURES["class-means"]})
    first, again = (write_figures(real_summary, tmp_path / name) for name in ("first", "again"))
    for file, other in zip(first, again, strict=True):
        if file.suffix != ".pdf":
            assert file.read_bytes() == other.read_bytes(), file.name


def draw(name, summary):
    with drawing():
        return FIGURES[name](summary)


def test_curves_show_the_numbers_head_to_tail(real_summary):
    order = real_summary.order
    lines = draw("class-means", real_summary).axes[1].lines
    np.testing.assert_allclose(lines[0].get_ydata(), real_summary.before.means.margins[order])
    np.testing.assert_allclose(lines[1].get_ydata(), real_summary.after.means.margins[order])
    before, after, changes = draw("class-accuracy", real_summary).axes[0].collections
    for dots, state in ((before, real_summary.before), (after, real_summary.after)):
        shown = 100 * np.array(state.metrics.per_class)[order]
        np.testing.assert_allclose(dots.get_offsets()[:, 1], shown)
    ends = np.array([segment[:, 1] for segment in changes.get_segments()])
    np.testing.assert_allclose(ends, np.stack([before.get_offsets()[:, 1], after.get_offsets()[:, 1]], axis=1))


def test_rows_of_the_confusion_are_true_classes(real_summary):
    figure = draw("confusion", real_summary)
    order = real_summary.order
    for axes, state in zip(figure.axes, (real_summary.before, real_summary.after), strict=False):
        shown = np.asarray(axes.images[0].get_array())
        counts = state.metrics.matrix()[np.ix_(order, order)]
        np.testing.assert_allclose(shown, 100 * counts / counts.sum(1, keepdims=True))
        np.testing.assert_allclose(shown.sum(1), 100)
        assert not np.allclose(shown.sum(0), 100)
        assert axes.get_ylabel().startswith("true class")
        assert axes.get_xlabel().startswith("predicted class")


def test_figures_say_which_images_they_show(real_summary):
    for name in FIGURES:
        figure = draw(name, real_summary)
        labels = [axes.get_ylabel() for axes in figure.axes]
        assert any("test images" in label for label in labels), (name, labels)


@pytest.mark.parametrize("classes", [2, 130])
def test_few_and_many_classes_are_drawn(classes, tmp_path):
    rng = np.random.default_rng(0)
    counts = np.maximum(200 // (1 + np.arange(classes)), 2)

    def outputs(sizes, split):
        labels = np.repeat(np.arange(classes), sizes)
        logits = rng.normal(size=(len(labels), classes)) + 2 * np.eye(classes)[labels] + np.linspace(1, -1, classes)
        return Outputs(labels, counts, logits=logits.astype(np.float32), split=split)

    summary = summary_of(outputs(counts, "train"), outputs(np.full(classes, 4), "test"))
    files = write_figures(summary, tmp_path)
    assert {file.stem for file in files} == set(FIGURES)


def test_dollars_in_class_names_are_no_mathematics(real_summary, tmp_path):
    names = (r"$\frac{$", "$x$ and $y$", *real_summary.class_names[2:])
    summary = replace(real_summary, class_names=names)
    for file in write_figures(summary, tmp_path):
        if file.suffix == ".svg" and file.stem in ("class-accuracy", "confusion"):
            assert "$x$ and $y$" in file.read_text()


def test_letters_that_no_font_has_are_no_warning(real_summary, tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(figures, "FIGURES", {"class-accuracy": FIGURES["class-accuracy"]})
    names = ("\N{CJK UNIFIED IDEOGRAPH-732B}", "\N{GRINNING FACE}", *real_summary.class_names[2:])
    write_figures(replace(real_summary, class_names=names), tmp_path)
    assert not recwarn.list


def test_long_names_leave_room_for_the_curves_and_do_not_overprint(tmp_path):
    classes = 40
    counts = np.arange(2 * classes, classes, -1)
    names = tuple(f"{label} a name of fifty-seven letters, which no axis can hold" for label in range(classes))
    labels = np.repeat(np.arange(classes), counts)
    logits = (np.random.default_rng(0).normal(size=(len(labels), classes)) + np.eye(classes)[labels]).astype(np.float32)
    outputs = Outputs(labels, counts, logits=logits, class_names=names, split="test")
    summary = summary_of(replace(outputs, split="train"), outputs)
    for name in ("class-means", "class-accuracy", "winners-and-losers", "confusion"):
        figure = draw(name, summary)
        FigureCanvasAgg(figure).draw()
        for axes in figure.axes[: len(figure.axes) // 2]:
            assert axes.get_window_extent().height > 0.4 * figure.bbox.height, name
    rows = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert not any(upper.overlaps(lower) for upper, lower in pairwise(rows))
