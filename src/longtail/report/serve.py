"""A page on this machine alone: upload or name new images, and see the predictions before and after calibration.

The server listens on the loopback address, answers requests of its own page only, and writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from threading import Lock
from typing import Any
from urllib.parse import unquote

from PIL import Image

from longtail.data.decode import as_rgb, opened_picture
from longtail.data.list_files import find_images
from longtail.errors import UserError
from longtail.files.reading import expanded
from longtail.report.page import thumbnail
from longtail.runs.folder import Run
from longtail.runs.prediction import Predictor
from longtail.tasks.calibrate_run import calibrations_of

LOOPBACK = "127.0.0.1"
MOST_BYTES = 64 << 20  # of an uploaded image
MOST_IMAGES = 50  # of a folder
SHOWN_CLASSES = 5

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>longtail: new images</title><link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1.2rem auto; padding: 0 1rem; }
form { display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; }
#path { flex: 1 1 16rem; font: inherit; padding: .3rem .5rem; }
article { display: grid; grid-template-columns: 72px 1fr 1fr; gap: .8rem; padding: .7rem 0; }
article { border-top: 1px solid #8886; }
article h2 { grid-column: 1 / -1; font-size: 1rem; margin: 0; overflow-wrap: anywhere; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
caption { text-align: left; color: #777; } td:last-child { text-align: right; } tr:first-of-type { font-weight: 650; }
@media (max-width: 600px) { article { grid-template-columns: 1fr 1fr; } article img { grid-column: 1 / -1; } }
</style></head><body>
<h1>New images</h1>
<form id="form"><input id="files" type="file" accept="image/*" multiple aria-label="images to upload">
<input id="path" placeholder="or a path on this machine: an image or a folder" aria-label="path">
<button>Predict</button></form>
<p id="note" role="status"></p><main id="found"></main>
<script>
const byId = (id) => document.getElementById(id);
function table(title, rows) {
  const made = document.createElement("table");
  made.createCaption().textContent = title;
  for (const [name, share] of rows) {
    const row = made.insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = (100 * share).toFixed(1) + " %";
  }
  return made;
}
function show(answer) {
  for (const image of answer.images) {
    const [article, title, picture] = ["article", "h2", "img"].map((tag) => document.createElement(tag));
    title.textContent = image.name; picture.src = image.picture; picture.alt = "";
    article.append(title, picture, ...image.predictions.map(({ title, top }) => table(title, top)));
    byId("found").append(article);
  }
}
async function ask(url, body) {
  const response = await fetch(url, { method: "POST", body });
  const answer = await response.json();
  if (response.ok) show(answer);
  byId("note").textContent = answer.note ?? "";
}
byId("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  byId("found").replaceChildren(); byId("note").textContent = "predicting";
  for (const file of byId("files").files) await ask("/upload?" + encodeURIComponent(file.name), file);
  if (byId("path").value) await ask("/path", byId("path").value);
});
</script></body></html>
"""


def predictors_of(run: Run) -> dict[str, Predictor]:
    """The models to compare, by title: as trained, and with its newest calibration or that of a calibrated run."""
    trained = Run.open(run.calibration.run) if run.calibration else run
    calibrated = run.folder if run.calibration else next(iter(calibrations_of(trained)), None)
    models = {"before": Predictor(trained)}
    if calibrated is not None:
        after = Run.open(calibrated)
        assert after.calibration is not None
        models[after.calibration.title] = Predictor(after)
    return models


def make_server(predictors: dict[str, Predictor], port: int = 0) -> ThreadingHTTPServer:
    """A server on the loopback address, by default at a free port; `serve_forever` starts it."""
    one_at_a_time = Lock()

    def answer(names: Iterable[str], pictures: list[Image.Image], note: str = "") -> dict[str, Any]:
        with one_at_a_time:
            found = {
                title: one.predict(pictures, progress=False).top(SHOWN_CLASSES) for title, one in predictors.items()
            }
        images = [
            {
                "name": name,
                "picture": thumbnail(picture),
                "predictions": [{"title": title, "top": rows[place]} for title, rows in found.items()],
            }
            for place, (name, picture) in enumerate(zip(names, pictures, strict=True))
        ]
        return {"images": images, "note": note}

    def uploaded(name: str, body: bytes) -> dict[str, Any]:
        with opened_picture(BytesIO(body)) as picture:
            return answer([unquote(name)], [as_rgb(picture)])

    def at_path(path: str) -> dict[str, Any]:
        images = find_images([expanded(path)], tuple(next(iter(predictors.values())).class_names))
        shown = range(min(len(images), MOST_IMAGES))
        note = f"the first {MOST_IMAGES} of {len(images):,} images" if len(images) > MOST_IMAGES else ""
        return answer(
            [str(images.path(index)) for index in shown], [as_rgb(images.open(index)) for index in shown], note
        )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/" or not self._is_own():
                return self._send(404, {"note": "there is only one page: /"})
            return self._send(200, PAGE)

        def do_POST(self) -> None:
            size = self.headers.get("Content-Length", "")
            if not self._is_own() or not size.isdecimal() or int(size) > MOST_BYTES:
                self.close_connection = True  # the body is not read
                return self._send(403, {"note": "only images of up to 64 MB from the page of this server are accepted"})
            body, (route, _, name) = self.rfile.read(int(size)), self.path.partition("?")
            try:
                found = at_path(body.decode()) if route == "/path" else uploaded(name, body)
            except (UserError, OSError, ValueError, SyntaxError) as error:  # what Pillow raises for damaged images
                return self._send(400, {"note": str(error)})
            return self._send(200, found)

        def _is_own(self) -> bool:
            """Whether the page of this server asks, and not another page that is open in the browser."""
            own = [f"{host}:{self.server.server_port}" for host in (LOOPBACK, "localhost")]  # type: ignore[attr-defined]
            origin = self.headers.get("Origin", "")
            return self.headers.get("Host") in own and (not origin or origin.removeprefix("http://") in own)

        def _send(self, status: int, content: str | dict[str, Any]) -> None:
            kind, text = ("html", content) if isinstance(content, str) else ("json", json.dumps(content))
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{'text' if kind == 'html' else 'application'}/{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are not printed."""

    return ThreadingHTTPServer((LOOPBACK, port), Handler)
