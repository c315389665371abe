import csv
import io

import numpy as np
import pytest

from longtail.errors import UserError
from longtail.report.terminal import terminal_table
from longtail.tasks.tables import latex, markdown, summarise, tidy_csv, write_tables

LABELS = np.repeat(np.arange(4), 50)


def make(tmp_path, data="digits"):
    """Results of three methods and two seeds with made-up predictions."""
    rng = np.random.default_rng(0)
    results = []
    for method, title, family, rate in (
        ("softmax", "Softmax", "standard", 0.6),
        ("marc", "MARC", "decision boundary", 0.8),
        ("lws", "Decouple-LWS", "decision boundary", 0.75),
    ):
        for seed in (0, 1):
            hit = rng.random(200) < rate
            predictions = np.where(hit, LABELS, (LABELS + 1) % 4)
            np.savez(tmp_path / f"{method}-seed{seed}.npz", predictions=predictions, labels=LABELS)
            score = float(hit.mean())
            metrics = {
                "top1": score,
                "balanced": score,
                "many": score,
                "medium": 0.5,
                "few": None,
                "macro_f1": score,
                "ece": 1 - score,
            }
            config = {"data": data, "profile": "exp", "imbalance": 10.0}
            results.append(
                {
                    "method": method,
                    "title": title,
                    "family": family,
                    "seed": seed,
                    "metrics": metrics,
                    "class_counts": [40, 30, 20, 10],
                    "identity": {"config": config},
                }
            )
    return results


def test_rows_hold_means_intervals_and_paired_differences(tmp_path):
    results = make(tmp_path)
    rows = {row.method: row for row in summarise(results, tmp_path)}
    scores = [r["metrics"]["balanced"] for r in results if r["method"] == "marc"]
    assert rows["marc"].scores["balanced"].value == pytest.approx(np.mean(scores))
    assert rows["marc"].scores["few"] is None
    assert rows["marc"].against["softmax"].low > 0
    assert rows["marc"].against["softmax"].value == pytest.approx(
        rows["marc"].scores["balanced"].value - rows["softmax"].scores["balanced"].value
    )
    assert set(rows["lws"].against) == {"softmax", "marc"}
    assert set(rows["softmax"].against) == {"marc"}
    assert list(rows) == ["softmax", "lws", "marc"]


def test_tables_mark_the_best_and_the_second(tmp_path):
    results = make(tmp_path)
    rows = summarise(results, tmp_path)
    text = markdown(rows, "made up")
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert lines["MARC"].count("**") >= 4
    assert "<u>" in lines["Decouple-LWS"]
    assert "none" in lines["MARC"]
    assert "| *Decision boundary adjustment* |" in text
    tex = latex(rows, "50 % of x_y & z ~^\\")
    assert r"\caption{50 \% of x\_y \& z \textasciitilde{}\textasciicircum{}\textbackslash{}}" in tex
    assert r"MARC & \textbf{" in tex
    assert tex.count(r"\midrule") == 2
    assert terminal_table(rows, "made up").row_count == 3


def test_equal_numbers_are_marked_alike(tmp_path):
    lines = markdown(summarise(make(tmp_path), tmp_path), "made up").splitlines()
    medium = [line.split("|")[3].strip() for line in lines if line.startswith(("| Soft", "| MARC", "| Deco"))]
    assert medium == ["**50.0 ± 0.0**"] * 3


def test_csv_is_tidy(tmp_path):
    lines = list(csv.DictReader(io.StringIO(tidy_csv(make(tmp_path)))))
    assert len(lines) == 6 * 7
    assert {line["score"] for line in lines} == {"top1", "many", "medium", "few", "balanced", "macro_f1", "ece"}
    assert [line["value"] for line in lines if line["score"] == "few"] == [""] * 6


def test_everything_is_written(tmp_path):
    results = make(tmp_path)
    rows = summarise(results, tmp_path)
    files = write_tables(rows, results, tmp_path / "out", "made up")
    assert sorted(file.name for file in files) == ["results.csv", "results.json", "table.md", "table.tex"]
    assert all(file.stat().st_size > 100 for file in files)


def test_results_of_different_data_sets_are_not_mixed(tmp_path):
    results = make(tmp_path)
    results[0]["identity"] = {"config": {"data": "cifar10", "profile": "exp", "imbalance": 100.0}}
    with pytest.raises(UserError, match="different data sets do not go into one table: cifar10 x 100, digits x 10"):
        summarise(results, tmp_path)
    with pytest.raises(UserError, match="no results"):
        summarise([], tmp_path)
