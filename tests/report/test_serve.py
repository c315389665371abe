"""The page for new images, on this machine alone."""

import http.client
import json
import shutil
import socket
import struct
import urllib.error
import urllib.request
import zlib
from io import BytesIO
from threading import Thread
from urllib.parse import urlencode, urlsplit

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail import HALO, Run
from longtail.cli.main import main
from longtail.report.serve import MOST_BYTES, Server, predictors_of
from longtail.tasks.calibrate_run import calibrate_run


@pytest.fixture(scope="module")
def served(digits_run, tmp_path_factory):
    """The address of a server for a calibrated run, and the folder of the run."""
    folder = tmp_path_factory.mktemp("served") / "run"
    shutil.copytree(digits_run, folder)
    calibrate_run(Run.open(folder), HALO())
    server = Server(predictors_of(Run.open(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.address, folder
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    """A folder of 52 new images."""
    folder = tmp_path_factory.mktemp("images") / "new"
    folder.mkdir()
    for number in range(52):
        digit(10 * number).save(folder / f"{number:02}.png")
    return folder


def digit(number):
    pixels = longtail.data.open_splits("digits-lt").split("test").pixels[number, 0].numpy()
    return Image.fromarray(pixels)


def png(picture):
    buffer = BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def ask(address, body, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=600) as response:
        return json.load(response)


def test_uploaded_images_have_the_predictions_of_both_models_and_a_set(served):
    address, folder = served
    for number in (0, 300, 599):
        query = urlencode({"name": "a digit.png", "coverage": 80})
        (image,) = ask(f"{address}upload?{query}", png(digit(number)))["images"]
        assert image["name"] == "a digit.png"
        assert image["picture"].startswith("data:image/png;base64,")
        assert [one["title"] for one in image["predictions"]] == ["before", "HALO"]
        for one, model in zip(image["predictions"], (folder, folder / "halo"), strict=True):
            expected = longtail.load(model).predict(digit(number), progress=False).top(5)[0]
            assert [name for name, _ in one["top"]] == [name for name, _ in expected]
            np.testing.assert_allclose([share for _, share in one["top"]], [share for _, share in expected], atol=1e-5)


def test_a_folder_has_the_sets_and_the_frequencies_of_the_command(served, new, capsys):
    address, folder = served
    found = ask(f"{address}path?coverage=80", str(new).encode())
    assert len(found["images"]) == 50
    assert found["note"] == "the first 50 of 52 images."
    files = [image["name"] for image in found["images"]]

    def predicted(*options):
        capsys.readouterr()
        assert main(["predict", str(folder / "halo"), *files, *options, "--json", "--workers=0"]) == 0
        return json.loads(capsys.readouterr().out)

    images = predicted("--coverage", "0.8")["images"]
    assert [image["set"] for image in found["images"]] == [image["set"] for image in images]
    batch = json.dumps([one["probabilities"] for one in found["images"]]).encode()
    prior = predicted("--target-prior", "estimate")["target_prior"]
    interval = f"to the power {prior['power']:.2f} (95 % interval {prior['low']:.2f} to {prior['high']:.2f}"
    assert interval in ask(f"{address}prior", batch)["lines"][0]


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


HUGE = (
    b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)) + chunk(b"IEND", b"")
)
BAD_ROWS = (b"[[0.5,0.5]]", b"[" * 100_000, b"{}", b"[[NaN,0,0,0,0,0,0,0,0,0]]", b"[[2,-1,0,0,0,0,0,0,0,0]]", b"[]")


@pytest.mark.parametrize(
    ("route", "body", "headers", "status", "note"),
    [
        ("upload?name=x.png", b"no image", {}, 400, "x.png is not an image"),
        ("upload?name=x.png", b"", {}, 400, "x.png is not an image"),
        ("upload?name=x.png", HUGE, {}, 400, "pixels"),
        ("upload?name=x.png", png(Image.new("L", (8, 8)))[:40], {}, 400, "x.png is not an image"),
        ("upload?name=x.ps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", {}, 400, "x.ps is not an image"),
        ("upload?coverage=many", png(Image.new("L", (8, 8))), {}, 400, "many"),
        ("upload?coverage=100", png(Image.new("L", (8, 8))), {}, 400, "coverage must be"),
        ("path", b"/nowhere/at/all", {}, 400, "/nowhere/at/all"),
        ("path", b"/etc/passwd", {}, 400, "passwd"),
        ("path", b"\x00", {}, 400, "does not exist"),
        ("path", b"\xff", {}, 400, "utf-8"),
        *(("prior", rows, {}, 400, "") for rows in BAD_ROWS),
        ("prior", json.dumps([[0.1] * 10] * 3).encode(), {}, 400, "30 samples at least"),
        ("path", b"/root", {"Origin": "http://example.com"}, 403, "only images"),
        ("path", b"/root", {"Host": "example.com"}, 403, "only images"),
        ("upload", b"", {"Content-Length": str(MOST_BYTES + 1)}, 403, "only images"),
        ("upload", b"", {"Content-Length": "-1"}, 403, "only images"),
        ("other", b"", {}, 404, "only one page"),
        ("other", None, {}, 404, "only one page"),
        ("../upload", b"", {}, 404, "only one page"),
        ("", None, {"Host": "example.com"}, 403, "only the page"),
    ],
)
def test_other_requests_are_refused_in_one_line(served, capfd, route, body, headers, status, note):
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(served[0] + route, body, **headers)
    with error.value as refused:
        said = json.load(refused)["note"]
    assert refused.status == status
    assert note in said
    assert said
    assert "\n" not in said
    assert "Traceback" not in capfd.readouterr().err


def test_without_the_secret_nothing_is_served(served):
    url = urlsplit(served[0])
    for path, body in (("/", None), ("/upload", b"x"), ("/path", b"/root")):
        with pytest.raises(urllib.error.HTTPError) as error:
            ask(f"http://{url.netloc}{path}", body)
        with error.value as refused:
            assert refused.status == 404


def test_other_methods_and_broken_requests_leave_the_server_running(served, capfd):
    url = urlsplit(served[0])
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT"):
        connection = http.client.HTTPConnection(url.netloc, timeout=600)
        connection.request(method, url.path)
        response = connection.getresponse()
        assert response.status == 501
        assert json.loads(response.read())["note"] == f"Unsupported method ('{method}')"
        connection.close()
    for sent in (b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"):
        with socket.create_connection((url.hostname, url.port), timeout=600) as raw:
            raw.sendall(sent)
    with socket.create_connection((url.hostname, url.port), timeout=600) as raw:  # it goes away in the middle
        raw.sendall(f"POST {url.path}upload HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: 99\r\n\r\nabc".encode())
    assert ask(f"{served[0]}upload?name=x.png", png(digit(0)))["images"][0]["name"] == "x.png"
    assert "Traceback" not in capfd.readouterr().err


def test_the_page_shows_them_in_a_browser_without_a_network(served, new, browser, tmp_path):
    digit(5).save(tmp_path / "<b>five.png")
    (tmp_path / "none.png").write_bytes(b"no image")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_default_timeout(600_000)
    complaints, asked = [], []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(served[0])
    page.set_input_files("#files", [tmp_path / "<b>five.png", tmp_path / "none.png"])
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector("#prior:not([hidden])")
    assert page.locator("article h2").all_inner_texts() == ["<b>five.png"]
    assert page.locator("article caption").all_inner_texts() == ["before", "HALO"]
    assert page.locator("article table").first.locator("tr").count() == 5
    assert page.locator("article p").inner_text().startswith("set at 90 %: ")
    assert "none.png is not an image" in page.locator("#note").inner_text()
    assert "30 samples at least" in page.locator("#prior p").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_input_files("#files", [])
    page.fill("#path", str(new))
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector("#prior:not([hidden]) p:has-text('class frequencies estimated from 50 images')")
    assert page.locator("article").count() == 50
    assert "first 50 of 52 images" in page.locator("#note").inner_text()
    assert complaints == []
    assert all(url.startswith((served[0], "data:")) for url in asked)
    page.close()


def test_only_one_run_is_served(capsys, tmp_path):
    assert main(["report", str(tmp_path), str(tmp_path), "--serve"]) == 2
    assert "--serve takes the folder of one run" in capsys.readouterr().err
