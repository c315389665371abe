"""ShotAccuracy is what `evaluate_predictions` says, however the samples come."""

import numpy as np
import pytest
import torch

import longtail
from longtail.errors import UserError

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
integration = pytest.importorskip("longtail.integrations.torchmetrics")

COUNTS = np.array([300, 150, 60, 10, 5])


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_scores_of_batches_are_those_of_all(parts):
    generator = torch.Generator().manual_seed(parts)
    logits, labels = torch.randn(101, 5, generator=generator), torch.randint(0, 5, (101,), generator=generator)
    metric = integration.ShotAccuracy(COUNTS)
    for some, own in zip(logits.chunk(parts), labels.chunk(parts), strict=True):
        metric.update(some, own)
    expected = longtail.evaluate(logits, labels, COUNTS)
    found = metric.compute()
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {name: getattr(expected, name) for name in ("balanced", "many", "medium", "few")}
    )


def test_in_a_collection_and_after_a_reset():
    metrics = torchmetrics.MetricCollection({"shots": integration.ShotAccuracy(COUNTS)})
    metrics.update(torch.eye(5), torch.arange(5))
    assert float(metrics.compute()["few"]) == 1
    metrics.reset()
    metrics.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    found = metrics.compute()
    assert "few" not in found  # no sample of a few-shot class: nothing is said of it
    assert (float(found["many"]), float(found["medium"]), float(found["balanced"])) == (1, 0, 0.5)


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (torch.zeros(2, 4), torch.zeros(2).long(), "predictions have 4 classes, class_counts has 5"),
        (torch.zeros(3).long(), torch.zeros(2).long(), r"predictions \(3,\) and labels \(2,\) do not fit"),
        (torch.zeros(2, 5), torch.tensor([0, 5]), r"labels are 0\.\.5, classes are 0\.\.4"),
    ],
)
def test_what_does_not_fit_is_named(predictions, labels, message):
    with pytest.raises(UserError, match=message):
        integration.ShotAccuracy(COUNTS).update(predictions, labels)
