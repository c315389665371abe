"""A page on this machine alone: upload or name new images; it shows the predictions before and after calibration.

The server listens on the loopback address, responds only to its own page, whose address holds a secret, and writes
nothing. It keeps nothing either: for the class frequencies of a batch, the page sends the probabilities back.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from PIL import Image

from longtail.data.augment import as_rgb, opened_picture
from longtail.data.listings import find_images
from longtail.errors import UserError, number
from longtail.files.reading import expanded, reading
from longtail.report.page import ASSETS, thumbnail
from longtail.runs.folder import Run
from longtail.runs.prediction import Predicted, Predictor
from longtail.tasks.calibrate_run import calibrations_of
from longtail.tasks.deployment import ESTIMATE, Deployment

LOOPBACK = "127.0.0.1"
MOST_BYTES = 64 << 20  # of an uploaded image
MOST_IMAGES = 50  # of a folder
SHOWN_CLASSES = 5
ROUTES = ("upload", "path", "prior")
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


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


class Server(ThreadingHTTPServer):
    """A server on the loopback address, by default at a free port; `serve_forever` starts it."""

    def __init__(self, predictors: dict[str, Predictor], port: int = 0) -> None:
        super().__init__((LOOPBACK, port), Handler)
        self.predictors = predictors
        self.last = list(predictors.values())[-1]
        self.deployment = Deployment.of(self.last.run)
        self.secret = f"/{secrets.token_urlsafe(16)}/"
        self.one_at_a_time = Lock()

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}{self.secret}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error."""

    def respond(self, route: str, body: bytes, query: dict[str, list[str]]) -> dict[str, Any]:
        """The content for a request of the page; raises an error of one line for whatever cannot be used."""
        if route == "prior":
            return {"lines": self._prior(body)}
        (name,), (coverage,) = query.get("name", ["image"]), query.get("coverage", [""])
        with reading(Path(name), "an image that can be predicted"):
            share = number("coverage", float(coverage) / 100, above=0, below=1) if coverage else None
            if route == "upload":
                with opened_picture(BytesIO(body)) as picture:
                    return self._described([(name, as_rgb(picture))], share)
            images = find_images([expanded(body.decode())], tuple(self.last.class_names))
            shown = range(min(len(images), MOST_IMAGES))
            content = self._described(((str(images.path(one)), as_rgb(images.open(one))) for one in shown), share)
        if len(images) > MOST_IMAGES:
            content["note"] = f"the first {MOST_IMAGES} of {len(images):,} images. {content['note']}".strip()
        return content

    def _described(self, pictures: Iterable[tuple[str, Image.Image]], coverage: float | None) -> dict[str, Any]:
        """Predictions of images, one after the other, so that only one is in memory; sets if the model has them."""
        images, note = [], ""
        for name, picture in pictures:
            with self.one_at_a_time:
                by_model = {title: one.predict(picture, progress=False) for title, one in self.predictors.items()}
            *_, predicted = by_model.values()
            members = None
            if coverage is not None:
                try:
                    members = replace(
                        predicted, sets=self.deployment.sets(predicted.probabilities, coverage)
                    ).set_names()
                except UserError as error:
                    note = str(error)
            images.append(
                {
                    "name": name,
                    "picture": thumbnail(picture),
                    "predictions": [
                        {"title": title, "top": one.top(SHOWN_CLASSES)[0]} for title, one in by_model.items()
                    ],
                    "set": members[0] if members else None,
                    "probabilities": predicted.probabilities[0].tolist(),
                }
            )
        return {"images": images, "note": note}

    def _prior(self, body: bytes) -> list[str]:
        """The class frequencies estimated from the probabilities (N, K) of a batch, in words."""
        names = self.last.class_names
        with reading(Path("probabilities"), "probabilities of images"):
            values = np.asarray(json.loads(body), dtype=np.float64)
            if values.ndim != 2 or values.shape[1] != len(names) or not (np.abs(values.sum(1) - 1) < 1e-3).all():
                raise ValueError(f"expected rows of {len(names)} numbers that sum to 1")
            if (values < 0).any():
                raise ValueError("there are negative ones")
        return self.deployment.apply(Predicted([""] * len(values), names, values), ESTIMATE, None)[2]


class Handler(BaseHTTPRequestHandler):
    """Requests of the page, all others refused in one line."""

    server: Server
    timeout = 60  # seconds without a byte, after which a connection is closed

    def do_GET(self) -> None:
        if not self._is_same_origin():
            return self._send(403, {"note": "only the page of this server is served"})
        if self.path != self.server.secret:
            return self._send(404, {"note": "there is only one page, at the address that the command has printed"})
        return self._send(200, (ASSETS / "serve.html").read_text(encoding="utf-8"))

    def do_POST(self) -> None:
        size, url = self.headers.get("Content-Length", ""), urlsplit(self.path)
        if not self._is_same_origin() or not size.isdecimal() or int(size) > MOST_BYTES:
            self.close_connection = True  # the body is not read
            return self._send(403, {"note": "only images of up to 64 MB from the page of this server are accepted"})
        route = url.path.removeprefix(self.server.secret)
        if route not in ROUTES:
            self.close_connection = True
            return self._send(404, {"note": "there is only one page, at the address that the command has printed"})
        try:
            content = self.server.respond(route, self.rfile.read(int(size)), parse_qs(url.query))
        except UserError as error:
            return self._send(400, {"note": str(error)})
        return self._send(200, content)

    def _is_same_origin(self) -> bool:
        """Whether the page of this server asks, and not another page that is open in the browser."""
        hosts = [f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")]
        origin = self.headers.get("Origin", "")
        return self.headers.get("Host") in hosts and (not origin or origin.removeprefix("http://") in hosts)

    def _send(self, status: int, content: str | dict[str, Any]) -> None:
        kind, text = ("text/html", content) if isinstance(content, str) else ("application/json", json.dumps(content))
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Other methods and malformed requests."""
        self.close_connection = True
        self._send(code, {"note": message or "the request is malformed"})

    def log_message(self, *_: object) -> None:
        """Requests are not printed."""
