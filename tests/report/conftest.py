"""A summary of real features, made once."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from longtail import HALO, MARC, Outputs
from longtail.posthoc import CRT, LWS, DisAlign
from longtail.posthoc.base import PostHoc
from longtail.report.build import fitted_here
from longtail.report.summary import Calibrated, Summary, summarise

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture(scope="session")
def real_outputs(cifar_features):
    """(train, validation, test) outputs of a real ResNet-32; validation and test are halves of its test images."""
    data = cifar_features
    counts = np.bincount(data["y"])
    known = {"head_weight": data["weight"], "head_bias": data["bias"], "class_names": NAMES}

    def held_out(rows: slice, split: str) -> Outputs:
        logits, features = data["test"][rows], data["test_features"][rows]
        return Outputs(data["test_y"][rows], counts, logits=logits, features=features, split=split, **known)

    train = Outputs(data["y"], counts, logits=data["views"][0], features=data["view_features"][0], **known)
    return train, held_out(slice(0, None, 2), "validation"), held_out(slice(1, None, 2), "test")


def summary_of(train: Outputs, test: Outputs, validation: Outputs | None = None, **others: PostHoc) -> Summary:
    """A summary about MARC, with other methods beside it."""
    calibrated = [fitted_here("marc", MARC(), train, test, validation)]
    for name, method in others.items():
        logits = np.asarray(method.fit(train, validation=validation).transform(test))
        calibrated.append(Calibrated(name, logits, method.n_parameters_, method=name.lower()))
    return summarise(test, validation, calibrated)


@pytest.fixture(scope="session")
def real_summary(real_outputs):
    train, validation, test = real_outputs
    return summary_of(train, test, validation, DisAlign=DisAlign(max_iter=200), cRT=CRT(), LWS=LWS(), HALO=HALO())


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()
