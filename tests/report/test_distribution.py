from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from longtail.report.figures import write_distribution
from longtail.report.terminal import distribution_table
from longtail.tasks.class_distribution import ClassDistribution


def of_counts(counts: list[int]) -> ClassDistribution:
    names = tuple(f"[class] {label}" for label in range(len(counts)))
    return ClassDistribution("birds", names, np.array(counts), {"train": sum(counts)})


def text_of(profile: ClassDistribution) -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(distribution_table(profile))
    return capture.get()


def test_few_classes_are_all_shown_with_bars():
    text = text_of(of_counts([5, 300, 40]))
    rows = [line for line in text.splitlines() if "[class]" in line]
    assert [row.split()[2] for row in rows] == ["1", "2", "0"]  # head to tail
    assert [row.count("█") for row in rows] == [32, 4, 0]
    assert "86.96 %" in rows[0]
    assert "imbalance factor 60.0; Gini coefficient 0.57" in text


def test_thousands_of_classes_fit_on_a_screen():
    text = text_of(of_counts([max(1, 1000 - label // 5) for label in range(8000)]))
    assert "… 7,980 more" in text
    assert "7,601–8,000" in text
    assert len(text.splitlines()) < 70


def test_classes_without_images_are_said():
    assert "2 classes without an image" in text_of(of_counts([7, 0, 0]))


@pytest.mark.parametrize("counts", [[500, 100, 30, 3, 0], list(range(8000, 0, -1))])
def test_the_plot_is_a_picture_and_the_same_every_time(counts, tmp_path: Path):
    files = [tmp_path / "first.png", tmp_path / "second.png"]
    for file in files:
        write_distribution(of_counts(counts), file)
    with Image.open(files[0]) as picture:
        assert picture.width > 600
        assert len(picture.convert("RGB").getcolors(100_000)) > 10  # something is drawn
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_plot_takes_any_name(tmp_path: Path):
    names = (r"$\frac{$", "$x$ and $y$", "a name of fifty-seven letters, which no axis of a figure holds")
    profile = ClassDistribution("$birds$", names, np.array([50, 10, 3]), {"train": 63})
    write_distribution(profile, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 3000
