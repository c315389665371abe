"""The report page in a real browser: Chromium, driven by Playwright."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from longtail import MARC, Outputs
from longtail.cli.main import main
from longtail.metrics.intervals import Interval
from longtail.metrics.table import SCORES
from longtail.report.build import fitted_here
from longtail.report.page import Context, page_data, write_page
from longtail.report.summary import summarise, verdict
from longtail.tasks.diagnose import DiagnosisFile, Tried

from .conftest import summary_of

MOST = 6_000_000


def unfold(page):
    """Open every part of the page."""
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    page.wait_for_selector("#confusion-after .heatmaplayer image")
    page.wait_for_selector("#f1 .main-svg")


@pytest.fixture
def visit(browser):
    """Open a page and collect whatever its console complains about."""
    contexts = []

    def go(path, *, width=1366, scheme="light", folded=False):
        context = browser.new_context(viewport={"width": width, "height": 768}, color_scheme=scheme, offline=True)
        contexts.append(context)
        context.set_default_timeout(600_000)  # ms: the machine may be busy
        page = context.new_page()
        page.complaints = []
        page.on(
            "console", lambda line: page.complaints.append(line.text) if line.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto(f"file://{path}")
        page.wait_for_selector("#accuracy .main-svg")
        if not folded:
            unfold(page)
        return page

    yield go
    for context in contexts:
        context.close()


CONTEXT = Context("a real network", "longtail calibrate 'runs/my run'", {"data": "CIFAR-10-LT"})


@pytest.fixture(scope="session")
def page_path(real_summary, tmp_path_factory):
    return write_page(real_summary, CONTEXT, tmp_path_factory.mktemp("page") / "index.html")


def test_numbers_of_the_page_are_those_of_the_summary(real_summary):
    data = page_data(real_summary, CONTEXT)
    json.dumps(data, allow_nan=False)
    assert data["states"][1]["scores"]["balanced"] == round(100 * real_summary.after.metrics.balanced, 1)
    expected = [round(100 * real_summary.before.metrics.per_class[label], 1) for label in real_summary.order]
    assert data["states"][0]["accuracy"] == expected
    assert [point["strength"] for point in data["points"]] == [round(0.05 * step, 2) for step in range(21)]
    assert {state["title"]: state["parameters"] for state in data["states"]} == {
        "before": None,
        "MARC": 20,
        "DisAlign": 85,
        "cRT": 650,
        "LWS": 10,
        "HALO": real_summary.others["HALO"].parameters,
    }


def test_scores_on_images_that_a_method_was_fitted_on_are_marked(real_summary, tmp_path):
    caution = "They are on images that the method was fitted on."
    text = write_page(real_summary, replace(CONTEXT, caution=caution), tmp_path / "index.html").read_text()
    assert f"Measured on 5,000 test images, which the network was not trained on. {caution}" in text
    tried = [Tried("marc", -0.5, Interval(0.08, 0.06, 0.1), 0.8)]
    context = replace(CONTEXT, caution=caution, diagnosis=DiagnosisFile("model", "validation", "", tried, 5000, "marc"))
    text = write_page(real_summary, context, tmp_path / "index.html").read_text()
    assert f"{caution} There longtail diagnose expects +8.0 [+6.0, +10.0] points of balanced accuracy." in text


# Boxes of the parts of the first screen.
FIRST_SCREEN = """() => Object.fromEntries(["h1", "#verdict", "#cards", "#accuracy", "#who"].map((part) => {
    const { left, right, top, bottom } = document.querySelector(part).getBoundingClientRect();
    return [part, { left, right, top, bottom }];
}))"""


def check_first_screen(page, summary, *, wide):
    """What a reader sees without scrolling at 1366 x 768 and on a phone."""
    boxes = page.evaluate(FIRST_SCREEN)
    assert page.locator("#verdict").inner_text().replace("\xa0", " ") == verdict(summary)
    assert page.locator("#cards .card").count() == 3
    assert page.locator("details[open]").count() == 0
    if wide:
        assert max(box["bottom"] for box in boxes.values()) <= 768
        assert boxes["#accuracy"]["left"] >= boxes["#verdict"]["right"]  # the classes stand beside the verdict
    else:
        assert boxes["#cards"]["bottom"] <= 768
        assert boxes["#accuracy"]["top"] >= boxes["#cards"]["bottom"]


def test_a_part_is_drawn_when_it_is_opened(visit, page_path):
    page = visit(page_path, folded=True)
    assert page.locator("#changes .main-svg").count() == 0
    page.get_by_role("heading", name="Which classes win, which pay?").click()
    page.wait_for_selector("#changes .main-svg")
    width = page.evaluate("document.querySelector('#changes .main-svg').getBoundingClientRect().width")
    assert width == page.locator("#changes").evaluate("chart => chart.clientWidth") > 1000


def test_what_diagnose_recommends_instead_is_on_the_first_screen(real_summary, tmp_path):
    tried = [Tried("marc", -0.5, Interval(0.08, 0.06, 0.1), 0.8), Tried("halo", -0.4, GAIN, 0.85)]
    diagnosis = DiagnosisFile("model", "validation", "Calibrate with HALO.", tried, 5000, "halo")

    def text(found):
        return write_page(real_summary, replace(CONTEXT, diagnosis=found), tmp_path / "index.html").read_text()

    assert "longtail diagnose recommends HALO instead: +9.0 [+7.0, +11.0] points" in text(diagnosis)
    # Not if that is the method which the report is about, and not without a significant gain.
    unsure = replace(tried[1], gain=Interval(0.09, -0.07, 0.25))
    for other in (replace(diagnosis, method="marc"), replace(diagnosis, tried=[tried[0], unsure])):
        assert 'id="instead"' not in text(other)


GAIN = Interval(0.09, 0.07, 0.11)


def test_the_page_is_one_file_without_network(page_path):
    text = page_path.read_text()
    assert page_path.stat().st_size < MOST
    own = text.replace(text[text.index("<script>") : text.index("</script>")], "")  # without the library
    for outside in ('src="http', 'href="http', "@import", "fetch("):
        assert outside not in own


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_loads_without_complaints_and_draws_every_chart(visit, page_path, scheme):
    page = visit(page_path, scheme=scheme)
    assert page.complaints == []
    assert page.locator(".chart .main-svg").count() >= 11
    assert "test" in page.locator(".lead").inner_text()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = [int(part) for part in background.removeprefix("rgb(").removesuffix(")").split(",")]
    assert (sum(light) < 200) == (scheme == "dark")


def test_the_slider_changes_numbers_chart_and_command(visit, page_path, real_summary):
    page = visit(page_path)
    assert page.locator("#strength-value").inner_text() == "1.00"  # the calibration that was made
    heading = f"{SCORES['balanced'].heading} (test)"

    def balanced():
        return page.locator("#point-cards .card", has_text=heading).locator(".value").inner_text()

    at_first = balanced()
    assert at_first == f"{100 * real_summary.after.metrics.balanced:.1f}"
    assert page.locator("#command").inner_text() == "longtail calibrate 'runs/my run'"
    bars = "document.getElementById('point-accuracy').data.at(-1).y"
    drawn = page.evaluate(bars)
    page.locator("#strength").evaluate("(slider) => { slider.value = 7; slider.dispatchEvent(new Event('input')); }")
    assert page.locator("#strength-value").inner_text() == "0.35"
    assert balanced() == f"{100 * real_summary.points[7].metrics.balanced:.1f}" != at_first
    assert page.evaluate(bars) != drawn
    assert page.locator("#command").inner_text() == "longtail calibrate 'runs/my run' --strength 0.35"
    marked = page.evaluate(
        "document.getElementById('trade-off').data.find((trace) => trace.name === 'best on validation').x[0]"
    )
    best = max(real_summary.points, key=lambda point: round(100 * point.validation.balanced, 1))
    assert marked == best.strength
    assert page.complaints == []


@pytest.mark.parametrize("width", [1366, 390])
def test_the_slider_shows_what_mistakes_cost(visit, real_outputs, tmp_path, width):
    train, validation, test = real_outputs
    costs = np.where(np.eye(10), 0.0, 1.0) * np.array([1.0] * 7 + [3.0] * 3)[:, None]
    calibrated = replace(fitted_here("marc", MARC(), train, test, validation), costs=costs)
    summary = summarise(test, validation, [calibrated])
    page = visit(write_page(summary, CONTEXT, tmp_path / "index.html"), width=width)

    def card(split):
        return float(
            page.locator("#point-cards .card", has_text=f"Cost per image ({split})").locator(".value").inner_text()
        )

    page.locator("#strength").evaluate("(slider) => { slider.value = 7; slider.dispatchEvent(new Event('input')); }")
    at_seven = summary.points[7]
    predicted = (0.65 * test.logits + 0.35 * calibrated.logits).argmax(1)
    own = [costs[label, predicted[test.labels == label]].mean() for label in range(10)]
    assert at_seven.cost == pytest.approx(np.average(own, weights=test.class_counts), rel=1e-3)
    assert [card("test"), card("validation")] == pytest.approx([at_seven.cost, at_seven.validation_cost], rel=5e-3)
    trace = "document.getElementById('trade-off').data.find((trace) => trace.name === '{}')"
    best = min(summary.points, key=lambda point: point.validation_cost)
    assert page.evaluate(trace.format("best on validation") + ".x[0]") == best.strength
    assert page.evaluate(trace.format("Cost per image") + ".y") == [point.cost for point in summary.points]
    assert "cost per image" in page.locator("#verdict").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.complaints == []


def test_the_table_sorts_and_filters(visit, page_path):
    page = visit(page_path)

    def column(number):
        return page.locator(f"#classes tbody td:nth-child({number})").all_inner_texts()

    assert column(1)[0] == "airplane"
    page.get_by_role("button", name="change").click()
    changes = [float(text) for text in column(6)]
    assert changes == sorted(changes, reverse=True)
    page.get_by_role("button", name="change").click()
    assert [float(text) for text in column(6)] == sorted(changes)
    page.get_by_role("button", name="class", exact=True).click()
    assert column(1) == sorted(column(1))
    page.get_by_role("button", name="group").click()
    assert column(3) == ["many"] * 8 + ["medium"] * 2
    page.get_by_role("button", name="group").click()
    assert column(3) == ["medium"] * 2 + ["many"] * 8
    page.get_by_role("button", name="class", exact=True).click()
    page.fill("#filter", "tru")
    assert column(1) == ["truck"]
    assert page.locator("#shown").inner_text() == "1 of 10 classes"
    page.fill("#filter", "medium")
    assert sorted(column(1)) == ["ship", "truck"]


def made_up(classes, names=()):
    rng = np.random.default_rng(0)
    counts = np.maximum(500 // (1 + np.arange(classes)), 1)
    train_labels = np.repeat(np.arange(classes), np.minimum(counts, 3))
    test_labels = np.repeat(np.arange(classes), 2)

    def outputs(labels, split):
        logits = (rng.normal(size=(len(labels), classes)) + 4 * np.eye(classes)[labels]).astype(np.float32)
        return Outputs(labels, counts, logits=logits, split=split, class_names=names)

    return summary_of(outputs(train_labels, "train"), outputs(test_labels, "test"))


@pytest.mark.parametrize("width", [390, 1280])
def test_legends_and_names_lie_over_nothing(visit, tmp_path, width):
    names = tuple(f"{label} soft-coated wheaten terrier" for label in range(20))
    page = visit(write_page(made_up(20, names), CONTEXT, tmp_path / "index.html"), width=width)
    for chart in ("logits", "margins", "accuracy", "f1", "trade-off"):
        gap = f"""(() => {{
            const chart = document.getElementById("{chart}");
            const plotTop = chart.getBoundingClientRect().top + chart._fullLayout._size.t;
            return plotTop - chart.querySelector(".legend .bg").getBoundingClientRect().bottom;
        }})()"""
        assert page.evaluate(gap) >= 0, chart
    assert page.locator("#logits .xtick").all_text_contents()[0] == "0 soft-co… terrier"
    edges = """(part) => Array.from(document.querySelectorAll(part), (made) => {
        const { left, right, top, bottom } = made.getBoundingClientRect();
        return { left, right, top, bottom };
    })"""
    ticks = page.evaluate(edges, "#logits .xtick")
    assert len(ticks) == 20
    assert max(tick["bottom"] for tick in ticks) <= page.evaluate(edges, "#logits .xtitle")[0]["top"]
    assert all(left["right"] <= right["left"] + 1 for left, right in pairwise(ticks))
    chart = page.evaluate(edges, "#confusion-before")[0]
    assert min(tick["left"] for tick in page.evaluate(edges, "#confusion-before .ytick")) >= chart["left"]


def test_on_paper_charts_are_light_and_narrow(visit, page_path):
    page = visit(page_path, scheme="dark")
    look = """(() => {
        const chart = document.querySelector("#changes .main-svg");
        return [getComputedStyle(chart.querySelector("text")).fill, chart.getBoundingClientRect().width];
    })()"""
    dark, wide = page.evaluate(look)
    page.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = {look}; }})")
    page.pdf(format="A4")
    assert page.evaluate("printed") == ["rgb(29, 36, 48)", 680]
    assert page.evaluate(look) == [dark, wide] != ["rgb(29, 36, 48)", 680]
    assert page.complaints == []


def test_advice_fits_the_splits(real_summary, tmp_path):
    def text(summary):
        return write_page(summary, CONTEXT, tmp_path / "index.html").read_text()

    alone = [replace(point, validation=None) for point in real_summary.points]
    assert "Choose by the validation line; the test line is for the record." in text(real_summary)
    assert "Without validation images to choose by" in text(replace(real_summary, points=alone))
    assert "without a test split" in text(replace(real_summary, split="validation"))


def plain(found):
    """The text of an element with plain spaces in the place of those that do not break lines."""
    return " ".join(found.inner_text().split())


def test_confusions_promise_no_images_and_blame_no_standstill(visit, real_summary, tmp_path):
    first = real_summary.confusions[0]
    # Neither class is recognised after calibration: that the first is taken for another class now is no gain.
    elsewhere = replace(first, before=1.0, after=0.0, accuracy_before=0.0, accuracy_after=0.0)
    better, worse = (replace(first, accuracy_before=0.4, accuracy_after=value) for value in (0.5, 0.3))
    summary = replace(real_summary, confusions=[elsewhere, better, worse], new_confusions=[worse])
    page = visit(write_page(summary, CONTEXT, tmp_path / "index.html"))
    assert page.get_by_role("heading", name="The worst").inner_text() == "The worst"
    notes = page.locator("#worst .note")
    moods = [notes.nth(place).get_attribute("class").strip() for place in range(6)]
    assert moods == ["note", "note", "note", "note good", "note", "note bad"]
    assert plain(notes.nth(0)) == "100 % before, 0 % after"
    assert plain(notes.nth(1)).endswith(": 0 % → 0 %")
    assert page.get_by_role("heading", name="New: more often than before").count() == 1
    assert plain(page.locator("#new .note").nth(1)).endswith(": 40 % → 30 %")


# Names on an axis that lie over each other, and how many there are.
OVERLAPS = """(chart) => {
    const boxes = [...document.querySelectorAll(`#${chart} .xtick`)].map((tick) => tick.getBoundingClientRect());
    const covered = boxes.filter((box, place) => place && boxes[place - 1].right > box.left + 2);
    return [boxes.length, covered.length];
}"""


# Names beside the confusion matrix that lie over each other.
STACKED = """() => {
    const names = [...document.querySelectorAll("#confusion-after .ytick text")];
    const boxes = names.map((name) => name.getBoundingClientRect()).sort((one, other) => one.top - other.top);
    return boxes.filter((box, place) => place && boxes[place - 1].bottom > box.top + 3).length;
}"""


@pytest.mark.parametrize("classes", [10, 33, 365, 1000])
def test_any_number_of_classes_fits_desk_and_phone(visit, tmp_path, classes):
    names = ("species 0 of grass", *(f"species {label}" for label in range(1, classes)))
    summary = made_up(classes, names)
    path = write_page(summary, CONTEXT, tmp_path / "index.html")
    assert path.stat().st_size < MOST
    for width in (1366, 390):
        page = visit(path, width=width, folded=True)
        check_first_screen(page, summary, wide=width > 1000)
        unfold(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for chart in ("accuracy", "logits", "changes", "point-accuracy"):
            count, covered = page.evaluate(OVERLAPS, chart)
            assert count >= min(classes, 10)
            assert covered == 0 or classes <= 10  # few names lie aslant, where boxes overlap and letters do not
            assert page.locator(f"#{chart} .xtick").first.text_content() == names[0]
        assert page.evaluate(STACKED) == 0
        corner = names[0] + (
            " …" if classes > 50 else ""
        )  # the end of a name is not cut for the mark of merged classes
        assert page.locator("#confusion-after .ytick text").first.text_content() == corner
        assert page.locator("#classes tbody tr").count() == classes
        legend = page.locator("#accuracy .legendtext").all_text_contents()
        assert any(" classes" in name and "mean of" in name for name in legend) == (classes > 60)
        assert page.get_by_text(f"{classes:,} classes in 50 rows and columns").count() == (classes > 50)
        edge = page.locator("#classes").evaluate("table => table.parentElement.getBoundingClientRect().right")
        for title in ("before", "after", "change"):
            box = page.locator("#classes thead").get_by_role("button", name=title, exact=True).bounding_box()
            assert box["x"] + box["width"] <= edge
        heading = page.locator("#methods th", has_text=SCORES["balanced"].heading).bounding_box()
        edge = page.locator("#methods").evaluate("table => table.parentElement.getBoundingClientRect().right")
        assert heading["x"] + heading["width"] <= edge  # of many columns this one is seen without scrolling
        assert page.complaints == []


def test_names_cannot_break_the_page(visit, tmp_path, real_outputs):
    train, _, test = real_outputs
    hidden = """'"><img src=x onerror="window.ran = 1">"""
    evil = ("</script><script>window.ran = 1</script>", "<b>&", hidden, *(f"c{i}" for i in range(7)))
    summary = summary_of(train, replace(test, class_names=evil))
    page = visit(write_page(summary, CONTEXT, tmp_path / "index.html"))
    assert page.complaints == []
    assert page.evaluate("window.ran") is None
    assert evil[0] in page.locator("#classes").inner_text()
    assert page.locator("#logits .xtick").all_text_contents()[1] == "<b>&"
    assert page.evaluate("document.getElementById('logits').data[2].text[1]") == "&lt;b&gt;&amp;"


def test_command_on_a_run_and_its_checkpoints(capsys, visit, digits_copy, tmp_path):
    second = tmp_path / "second"
    shutil.copytree(digits_copy, second)
    words = ["report", str(digits_copy), str(second), "--out", str(tmp_path / "report")]
    assert main(words) == 0
    assert "index.html" in capsys.readouterr().err
    page = visit(tmp_path / "report" / "index.html")
    assert page.locator("#worst img").count() > 4
    assert page.locator("h1").inner_text() == "digits-LT: 10 classes, network digits"
    # The command gives the scores of the point: it is fitted on the same images.
    assert page.locator("#command").inner_text().endswith("--method halo --images-per-class all")
    rows = page.locator("#checkpoints tr").all_inner_texts()
    assert len(rows) == 3
    assert rows[1].split("\t")[1:] == rows[2].split("\t")[1:]  # the same model twice
    assert page.complaints == []
    assert (tmp_path / "report" / "figures" / "class-means.svg").is_file()


def test_command_on_saved_logits(capsys, tmp_path, cifar_features):
    data = cifar_features
    np.savez(tmp_path / "train.npz", logits=data["views"][0], labels=data["y"], head_weight=data["weight"])
    np.savez(tmp_path / "test.npz", logits=data["test"], labels=data["test_y"])
    words = ["report", str(tmp_path / "train.npz"), "--test", str(tmp_path / "test.npz"), "--out", str(tmp_path / "r")]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"].endswith("index.html")
    numbers = json.loads((tmp_path / "r" / "report.json").read_text())
    assert numbers["states"][0]["scores"]["balanced"] == 69.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a run folder or a file"),
        (["{tmp}/nowhere"], "is not a run folder"),
        (["{tmp}/a.npz"], "needs --test FILE"),
        (
            ["{tmp}/a.npz", "--test", "{tmp}/b.npz", "--out", "{tmp}/o"],
            "b.npz: 3 classes, where the training samples have 2",
        ),
        (["{tmp}/a.npz", "{tmp}/b.npz"], "takes one file"),
        (["{tmp}", "--test", "{tmp}/b.npz"], "--test applies only to saved logits, and"),
    ],
)
def test_mistakes_are_one_line(capsys, tmp_path, words, message):
    rng = np.random.default_rng(0)
    for name, classes in (("a", 2), ("b", 3)):
        np.savez(tmp_path / f"{name}.npz", logits=rng.normal(size=(12, classes)), labels=np.arange(12) % classes)
    code = main(["report", *(word.format(tmp=tmp_path) for word in words)])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert message.format(tmp=tmp_path) in error


def test_a_half_finished_run_is_said(capsys, digits_copy):
    (digits_copy / "model.safetensors").unlink()
    assert main(["report", str(digits_copy)]) == 2
    assert "is not finished: continue with" in capsys.readouterr().err
