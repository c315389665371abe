"""The page for new images, on this machine alone."""

import json
import urllib.error
import urllib.request
from io import BytesIO
from threading import Thread
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail import MARC, Run
from longtail.cli.main import main
from longtail.report.serve import MOST_BYTES, make_server, predictors_of
from longtail.tasks.calibrate_run import calibrate_run


@pytest.fixture
def served(digits_copy):
    """A server for a calibrated run, its address, and the folder of the run."""
    run = Run.open(digits_copy)
    calibrate_run(run, MARC())
    server = make_server(predictors_of(run))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", digits_copy
    server.shutdown()
    server.server_close()


def digit(number):
    pixels = longtail.data.open_splits("digits-lt").split("test").pixels[number, 0].numpy()
    return Image.fromarray(pixels)


def ask(address, body, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=600) as response:
        return json.load(response)


def test_uploaded_images_have_the_predictions_of_both_models(served):
    address, folder = served
    for number in (0, 300, 599):
        buffer = BytesIO()
        digit(number).save(buffer, "PNG")
        (image,) = ask(f"{address}/upload?{quote('a digit.png')}", buffer.getvalue())["images"]
        assert image["name"] == "a digit.png"
        assert image["picture"].startswith("data:image/png;base64,")
        assert [one["title"] for one in image["predictions"]] == ["before", "MARC"]
        for one, model in zip(image["predictions"], (folder, folder / "marc"), strict=True):
            expected = longtail.load(model).predict(digit(number), progress=False).top(5)[0]
            assert [name for name, _ in one["top"]] == [name for name, _ in expected]
            np.testing.assert_allclose([share for _, share in one["top"]], [share for _, share in expected], atol=1e-5)


def test_a_folder_is_predicted_up_to_fifty_images(served, tmp_path):
    address, _ = served
    (tmp_path / "new").mkdir()
    for number in range(52):
        digit(number).save(tmp_path / "new" / f"{number:02}.png")
    found = ask(f"{address}/path", str(tmp_path / "new").encode())
    assert len(found["images"]) == 50
    assert found["note"] == "the first 50 of 52 images"


@pytest.mark.parametrize(
    ("route", "body", "headers", "status", "note"),
    [
        ("/upload?x.png", b"no image", {}, 400, "cannot identify image file"),
        ("/path", b"/nowhere/at/all", {}, 400, "/nowhere/at/all"),
        ("/path", b"/root", {"Origin": "http://example.com"}, 403, "only images"),
        ("/path", b"/root", {"Host": "example.com"}, 403, "only images"),
        ("/upload?x.png", b"", {"Content-Length": str(MOST_BYTES + 1)}, 403, "only images"),
        ("/other", None, {}, 404, "only one page"),
    ],
)
def test_other_requests_are_refused_in_one_line(served, route, body, headers, status, note):
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(served[0] + route, body, **headers)
    with error.value as refused:
        answer = json.load(refused)["note"]
    assert refused.status == status
    assert note in answer
    assert "\n" not in answer


def test_the_page_shows_them_in_a_browser(served, browser, tmp_path):
    digit(5).save(tmp_path / "<b>five.png")
    page = browser.new_page()
    page.set_default_timeout(600_000)
    page.goto(served[0])
    page.set_input_files("#files", tmp_path / "<b>five.png")
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector("article table")
    assert page.locator("article h2").inner_text() == "<b>five.png"
    assert page.locator("article caption").all_inner_texts() == ["before", "MARC"]
    assert page.locator("article table").first.locator("tr").count() == 5


def test_only_one_run_is_served(capsys, tmp_path):
    assert main(["report", str(tmp_path), str(tmp_path), "--serve"]) == 2
    assert "--serve takes the folder of one run" in capsys.readouterr().err
