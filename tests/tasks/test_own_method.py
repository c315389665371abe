"""A method from outside the package, by subclass alone, goes wherever the library's own go."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import longtail
from longtail.errors import UserError
from longtail.posthoc import AffinePostHoc, FitResult, PostHoc
from longtail.report.build import report_run
from longtail.tasks.calibrate_run import calibrate_run
from longtail.tasks.tables import markdown, summarise


class PriorShift(AffinePostHoc):
    """Takes a share of the log counts off the logits; its settings are called like other methods' settings."""

    tuned = ("share",)

    def __init__(self, share=0.5, form="linear", lr=0):
        self.share = share
        self.form = form
        self.lr = lr

    def check_settings(self):
        if self.form != "linear":
            raise UserError(f"form must be linear, not {self.form}")

    def _fit(self, data, validation):
        self.share_ = self.share
        self.scale_ = np.ones(data.num_classes)
        self.shift_ = -self.share * np.log(data.class_counts)
        self.result_ = FitResult.closed_form()

    @property
    def n_parameters_(self):
        return 0


class Squashed(PostHoc):
    """Gives a head that is not linear."""

    def _fit(self, data, validation):
        self.result_ = FitResult.closed_form()

    def _apply(self, logits, features):
        return logits.tanh()

    def head(self, linear):
        return nn.Sequential(linear, nn.Tanh())


def test_through_calibrate():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    data = longtail.data.open_splits("digits-lt")
    images, counts = data.train.pixels / 255, data.train.class_counts
    calibrated, method = longtail.calibrate(model, [(images, data.train.labels)], PriorShift(1.0), device="cpu")
    expected = model(images) - counts.log()
    torch.testing.assert_close(calibrated(images), expected, atol=1e-4, rtol=1e-4)
    assert method.chosen_ == {"share": 1.0}
    with pytest.raises(UserError, match="form must be linear"):
        longtail.calibrate(model, [(images, data.train.labels)], PriorShift(form="round"), device="cpu")


def test_through_compare_and_its_table(tmp_path):
    config = replace(longtail.RECIPES["digits-lt"], epochs=3, device="cpu")
    results = longtail.compare(config, ["softmax", PriorShift(0.7)], tmp_path, seeds=(0,))
    assert [result["method"] for result in results] == ["softmax", "priorshift-share=0.7"]
    text = markdown(summarise(results, tmp_path / "cells"), "made up")
    assert "| *Own methods* |" in text
    assert "| PriorShift (share 0.7) |" in text
    assert "0 numbers; share 0.7" in text


def test_through_a_run_its_report_and_its_exports(digits_copy, tmp_path):
    folder, scores = calibrate_run(longtail.Run.open(digits_copy), PriorShift(0.8))
    assert folder == digits_copy / "priorshift"
    _, summary = report_run([longtail.Run.open(digits_copy)], tmp_path / "report")
    test = next(score for score in scores if score.split == "test")
    assert summary.after.title == "PriorShift"
    assert summary.after.metrics.confusion == test.after.confusion
    page = (tmp_path / "report" / "index.html").read_text()
    assert "PriorShift (share 0.8) in" in page
    longtail.export(folder, tmp_path / "model", "safetensors")
    assert "Stage two: PriorShift; form linear, lr 0, share 0.8." in (tmp_path / "model" / "README.md").read_text()
    longtail.export(folder, tmp_path / "head.json", "json")
    assert json.loads((tmp_path / "head.json").read_text())["method"] == "priorshift"


class Unfolded(PriorShift):
    """Folds the head as it was, which is not what `transform` gives."""

    def fold(self, weight, bias):
        return weight, bias


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Squashed(), "cannot store the head of Squashed, a Sequential"),
        (Unfolded(), "Unfolded cannot be folded into the head of .*: the new network would not give the logits"),
        (Unfolded(1e-3), "Unfolded cannot be folded"),  # however little it changes
    ],
)
def test_a_head_that_no_run_folder_can_hold_is_refused(digits_copy, method, message):
    folders = sorted(digits_copy.glob("*.*"))
    with pytest.raises(UserError, match=message):
        calibrate_run(longtail.Run.open(digits_copy), method)
    assert sorted(digits_copy.glob("*.*")) == folders
    assert not (digits_copy / type(method).__name__.lower()).exists()
