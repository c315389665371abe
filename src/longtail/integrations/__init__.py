"""Callbacks for Hugging Face's Trainer and Lightning, a metric for torchmetrics; `Calibration` is what callbacks share.

Only the files of this package need those libraries: `from longtail.integrations.lightning import CalibrateCallback`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from longtail.data.labels import training_labels
from longtail.errors import UserError
from longtail.metrics.margins import describe_state
from longtail.metrics.scores import Metrics, evaluate
from longtail.outputs.extract import extract
from longtail.outputs.loaders import sampler_info
from longtail.outputs.record import Outputs
from longtail.posthoc.base import PostHoc
from longtail.posthoc.marc import MARC
from longtail.tasks.calibrate import calibrate

SCORES = ("balanced", "many", "medium", "few")


class Calibration:
    """Scores of held-out images during training, and a calibrated copy of the model at its end.

    The trained model is not changed. In a distributed job every process does the same.

    Args:
        method: the method to fit at the end (default: `MARC()`).
        class_counts: (K,) training samples per class, if the training set has no list of its labels.
        head: name of the classifier layer, if the model returns several outputs.

    Attributes:
        history_: the scores of each evaluation.
        model_: the calibrated model.
        method_: the fitted method.
        before_: scores of held-out images before calibration; None without a validation loader.
        after_: their scores after it.
    """

    model_: nn.Module
    method_: PostHoc
    before_: Metrics | None
    after_: Metrics | None

    def __init__(self, method: PostHoc | None = None, *, class_counts: Any = None, head: str | None = None) -> None:
        self.method = MARC() if method is None else method
        self.class_counts = class_counts
        self.head = head
        self.history_: list[dict[str, float]] = []
        self.method.check_settings()
        if self.method.multilabel:
            raise UserError("the callback scores one class per sample; call longtail.calibrate after the training")

    def score(self, model: nn.Module, held_out: Any, train: Any) -> dict[str, float]:
        """Balanced accuracy, accuracy by shots, and the correlation of margins with class size, on held-out batches."""
        outputs = self._held_out(model, held_out, train)
        state = describe_state("now", outputs.rows().read(slice(None)).numpy(), outputs)
        named = {name: getattr(state.metrics, name) for name in SCORES}
        scores = {name: float(value) for name, value in named.items() if value is not None}
        scores["margin_correlation"] = float(state.correlation["margins"])
        self.history_.append(scores)
        return scores

    def calibrate(self, model: nn.Module, train: Any, held_out: Any = None) -> None:
        """Calibrate with the training batches, and score held-out ones before and after."""
        options = self._options(model, self.class_counts)
        self.model_, self.method_ = calibrate(model, train, self.method, validation=held_out, **options)
        self.before_ = self.after_ = None
        if held_out is not None:
            outputs = self._held_out(model, held_out, train)
            before = outputs.rows().read(slice(None)).numpy()
            after = np.asarray(self.method_.transform(outputs))
            scores = (evaluate(logits, outputs.labels, outputs.class_counts) for logits in (before, after))
            self.before_, self.after_ = scores

    def _held_out(self, model: nn.Module, loader: Any, train: Any) -> Outputs:
        counts = self.class_counts
        if counts is None:
            info = sampler_info(train)
            labels = training_labels(info.dataset)
            if labels is None:
                raise UserError(
                    "the training set has no list of its labels, so the training samples per class are not known; "
                    "pass class_counts= to the callback"
                )
            counts = np.bincount(labels if info.support is None else labels[info.support])
        return extract(model, loader, split="validation", **self._options(model, counts))

    def _options(self, model: nn.Module, class_counts: Any) -> dict[str, Any]:
        device = str(next((tensor.device for tensor in model.parameters()), "auto"))
        return {"head": self.head, "class_counts": class_counts, "device": device}
