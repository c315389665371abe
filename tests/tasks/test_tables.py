import csv
import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

from longtail.errors import UserError
from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS
from longtail.metrics.intervals import Interval, show_difference
from longtail.metrics.table import SCORES
from longtail.report.terminal import price_lines, terminal_table
from longtail.tasks.tables import latex, markdown, summarise, tidy_csv

LABELS = np.repeat(np.arange(4), 50)


def make(tmp_path, data="digits"):
    """Results of three methods and three seeds with made-up predictions."""
    rng = np.random.default_rng(0)
    results = []
    for method, title, family, rate in (
        ("softmax", "Softmax", "standard", 0.6),
        ("marc", "MARC", "decision boundary", 0.8),
        ("lws", "Decouple-LWS", "decision boundary", 0.75),
    ):
        for seed in (0, 1, 2):
            hit = rng.random(200) < rate
            predictions = np.where(hit, LABELS, (LABELS + 1) % 4)
            np.savez(tmp_path / f"{method}-seed{seed}.npz", predictions=predictions, labels=LABELS)
            score = float(hit.mean())
            errors = {"nll": 2 - score, "brier": 1.5 - score, "ece": 1 - score}
            shots = {"many": 0.9 * score, "medium": 0.5, "few": None}
            metrics = {"top1": score, "balanced": score, "natural": score, **shots, "macro_f1": score, **errors}
            config = {"data": data, "profile": "exp", "imbalance": 10.0}
            results.append(
                {
                    "method": method,
                    "title": title,
                    "family": family,
                    "stage_one": "softmax",
                    "model": f"network of seed {seed}",
                    "seed": seed,
                    "metrics": metrics,
                    "class_counts": [40, 30, 20, 10],
                    "class_names": ["a", "b_c", "d", "e"],
                    "steps": 700,
                    "images": 7000 if method == "lws" else 3500,
                    "parameters": 8 if method == "marc" else None,
                    "chosen": {"gamma": 1.2 + seed / 10} if method == "marc" else {},
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


def cells_of(text):
    """{title: {heading: cell}} of the first table of a Markdown text."""
    lines = [line for line in text.split("\n\n")[1].splitlines() if line.startswith("| ")]
    headings, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(headings, row, strict=True)) for row in rows}


def test_every_column_holds_what_its_heading_says(tmp_path):
    results = make(tmp_path)
    rows = {row.method: row for row in summarise(results, tmp_path)}
    shown = cells_of(markdown(list(rows.values()), "made up"))["MARC"]
    assert list(shown)[1 : 1 + len(SCORES)] == [score.heading for score in SCORES.values()]
    for name, score in SCORES.items():
        values = [result["metrics"][name] for result in results if result["method"] == "marc"]
        plain = shown[score.heading].strip("*").removeprefix("<u>").removesuffix("</u>")
        assert plain.split(" ")[0] == ("none" if None in values else score.show(np.mean(values))), name
    for reference, heading in (("softmax", "vs Softmax"), ("marc", "vs MARC")):
        for method, title in (("lws", "Decouple-LWS"), ("softmax", "Softmax")):
            if method != reference:
                means = [rows[which].scores["balanced"].value for which in (method, reference)]
                told = cells_of(markdown(list(rows.values()), ""))[title][heading]
                assert told.startswith(f"{100 * (means[0] - means[1]):+.1f} ["), (title, heading)
    assert shown["vs MARC"] == ""
    assert shown["Steps"] == "700"
    assert shown["Images seen"] == "3,500"
    assert shown["Stage two"] == "8 numbers; gamma 1.2, 1.3, 1.4"


def test_tables_mark_the_best_and_the_second(tmp_path):
    rows = summarise(make(tmp_path), tmp_path)
    shown = cells_of(markdown(rows, "made up"))
    for name in ("balanced", "many", "nll", "brier", "ece"):  # of errors the lowest is the best
        heading = SCORES[name].heading
        assert shown["MARC"][heading].startswith("**"), name
        assert shown["Decouple-LWS"][heading].startswith("<u>"), name
        assert not shown["Softmax"][heading].startswith(("*", "<")), name
    assert shown["MARC"]["Few"] == "none"
    assert [row["Medium"] for row in shown.values() if row["Medium"]] == ["**50.0 ± 0.0**"] * 3  # equal: marked alike
    assert "| *Decision boundary adjustment* |" in markdown(rows, "made up")
    tex = latex(rows, "50 % of x_y & z ~^\\")
    assert r"\caption{50 \% of x\_y \& z \textasciitilde{}\textasciicircum{}\textbackslash{}}" in tex
    assert r"Method & Many & Medium & Few & Balanced accuracy & Top-1 \\" in tex
    assert r"MARC & \textbf{" in tex
    assert tex.count(r"\midrule") == 2


def test_a_terminal_shows_the_same(tmp_path):
    rows = summarise(make(tmp_path), tmp_path)
    table = terminal_table(rows, "made up")
    assert [column.header for column in table.columns][1:4] == ["Many", "Medium", "Few"]
    cells = dict(zip([column.header for column in table.columns], [list(c.cells) for c in table.columns], strict=True))
    many = [row.scores["many"].value for row in rows]
    for shown, value in zip(cells["Many"], many, strict=True):
        assert f"{100 * value:.1f}" in shown
    assert cells["vs Softmax"][0] == ""
    assert cells["vs Softmax"][1].startswith(f"{100 * rows[1].against['softmax'].value:+.1f} ")


def test_on_a_terminal_of_80_columns_no_name_is_broken_and_no_number_cut(tmp_path):
    titles = [method.title for method in (*TRAIN_METHODS.values(), *POSTHOC_METHODS.values())]
    softmax, marc, _ = summarise(make(tmp_path), tmp_path)
    long = Interval(0.2411, 0.2308, 0.2502)
    rows = [softmax, *(dataclasses.replace(marc, title=title, against={"softmax": long}) for title in titles)]
    console = Console(width=80, file=io.StringIO())
    console.print(terminal_table(rows, "made up"))
    lines = console.file.getvalue().splitlines()
    words = {word for line in lines for word in line.split()}
    assert {word for title in titles for word in title.split()} <= words
    assert sum("+24.1 [+23.1, +25.0]" in line for line in lines) == len(titles)
    assert max(map(len, lines)) <= 80


def test_one_method_with_one_or_two_seeds_has_no_interval_over_seeds(tmp_path):
    softmax = [result for result in make(tmp_path) if result["method"] == "softmax"]
    (row,) = summarise(softmax[:2], tmp_path)
    assert row.scores["balanced"].half_width is None
    one, two = (markdown(summarise(softmax[:seeds], tmp_path), "") for seeds in (1, 2))
    assert "with its 95 % interval over test images only" in two
    assert "Per cent (but NLL, Brier); one seed. " in one
    assert "seeds 0" not in one
    assert "; 2 seeds: mean. " in two
    values = ", ".join(f"{100 * result['metrics']['balanced']:.1f}" for result in softmax[:2])
    assert "| Method | Balanced accuracy, seeds 0, 1 | vs Softmax | vs MARC |" in two
    assert f"| Softmax | {values} |  |  |" in two


def test_a_difference_without_interval_is_its_value():
    shown = [show_difference(Interval(0.304, *ends)) for ends in ((None, None), (0.5, None), (-0.1, 0.7))]
    assert shown == ["+30.4", "+30.4", "+30.4 [-10.0, +70.0]"]


def test_csv_is_tidy(tmp_path):
    lines = list(csv.DictReader(io.StringIO(tidy_csv(make(tmp_path)))))
    assert len(lines) == 9 * len(SCORES)
    assert {line["score"] for line in lines} == set(SCORES)
    assert [line["value"] for line in lines if line["score"] == "few"] == [""] * 9
    assert [float(line["value"]) for line in lines if line["score"] == "medium"] == [0.5] * 9


def test_results_of_different_data_sets_are_not_mixed(tmp_path):
    results = make(tmp_path)
    results[0]["identity"] = {"config": {"data": "cifar10", "profile": "exp", "imbalance": 100.0}}
    with pytest.raises(UserError, match="different data sets cannot be in one table: cifar10 x 100, digits x 10"):
        summarise(results, tmp_path)
    with pytest.raises(UserError, match="no results"):
        summarise([], tmp_path)


def test_methods_on_different_networks_of_one_seed_are_not_compared(tmp_path):
    results = make(tmp_path)
    results[-1]["model"] = "trained again"
    with pytest.raises(UserError, match="softmax and lws of seed 2 belong to different networks"):
        summarise(results, tmp_path)


def test_a_method_on_top_of_another_is_compared_with_it(tmp_path):
    results = make(tmp_path)
    for result in results:
        if result["method"] == "lws":  # becomes a stage-one method, which MARC calibrates
            result["stage_one"], result["model"] = "lws", f"other network of seed {result['seed']}"
        if result["method"] == "marc":
            result["stage_one"], result["model"] = "lws", f"other network of seed {result['seed']}"
    rows = {row.method: row for row in summarise(results, tmp_path)}
    own = rows["marc"].scores["balanced"].value - rows["lws"].scores["balanced"].value
    assert rows["marc"].against["lws"].value == pytest.approx(own)
    assert "| vs its stage one |" in markdown(list(rows.values()), "")
    assert "vs its stage one" not in markdown(summarise(make(tmp_path), tmp_path), "")


def test_the_price_of_a_calibration_is_shown(tmp_path):
    """MARC takes b_c for another class in every seed; softmax, which nothing was done to, has no price."""
    results = make(tmp_path)
    for seed in (0, 1, 2):
        file = tmp_path / f"marc-seed{seed}.npz"
        with np.load(file) as stored:
            predictions = np.where(LABELS == 1, 2, stored["predictions"])
        np.savez(file, predictions=predictions, labels=LABELS)
    rows = {row.method: row for row in summarise(results, tmp_path)}
    (fallen,) = rows["marc"].fallen
    before = [np.load(tmp_path / f"softmax-seed{seed}.npz")["predictions"] == LABELS for seed in (0, 1, 2)]
    assert fallen.name == "b_c"
    assert (fallen.before, fallen.after) == (pytest.approx(np.mean(before, 0)[LABELS == 1].mean()), 0)
    assert rows["softmax"].fallen == rows["lws"].fallen == []
    text = markdown(list(rows.values()), "made up")
    assert f"interval:\n\n- MARC: b\\_c ({100 * fallen.before:.0f} → 0)\n" in text
    assert price_lines(list(rows.values())) == [f"MARC: recognised less often than before: {fallen}"]
    headings = [column.header for column in terminal_table([*rows.values()], "").columns]
    assert "Top-1 at training prior" in [" ".join(heading.split()) for heading in headings]
    # Cells of earlier versions have no names: those of another seed serve for all.
    half = summarise(
        [{**one, "class_names": [] if one["seed"] == 0 else one["class_names"]} for one in results], tmp_path
    )
    assert [one.name for row in half for one in row.fallen] == ["b_c"]
    unnamed = summarise([{**result, "class_names": []} for result in results], tmp_path)
    assert [one.name for row in unnamed for one in row.fallen] == ["1"]
    assert "less often" not in markdown([rows["softmax"], rows["lws"]], "made up")
