"""A walk through what users call, in seconds: run by whoever has just installed the library.

python benchmarks/smoke.py      in an empty folder, without the extras
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import longtail
from longtail.cli.main import main
from longtail.outputs.extract import find_head
from longtail.sklearn import CalibratedLongTail


def models() -> None:
    """Somebody's model and loader: calibrated, attached, extracted to a file, scored."""
    data = longtail.data.open_splits("digits-lt")
    images, labels = data.train.pixels.float().flatten(1) / 255, data.train.labels
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    loss, optimizer = (
        longtail.losses.BalancedSoftmax(longtail.class_counts(labels)),
        torch.optim.Adam(model.parameters()),
    )
    for _ in range(30):
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 100)
    calibrated, marc = longtail.calibrate(model, loader, progress=False, device="cpu")
    expected = marc.transform(model(images).detach())
    torch.testing.assert_close(calibrated(images).detach(), expected, rtol=1e-3, atol=1e-3)
    outputs = longtail.extract(model, loader, "outputs.safetensors", progress=False, device="cpu")
    attached = longtail.attach(model, longtail.MARC().fit(outputs))
    torch.testing.assert_close(attached(images).detach(), expected, rtol=1e-3, atol=1e-3)
    assert find_head(model, (images, labels), device="cpu") == ("2",)
    for method in (
        longtail.posthoc.LogitAdjustment(),
        longtail.posthoc.TauNorm(0.5),
        longtail.posthoc.CRT(ridge=0.1),
        longtail.posthoc.DisAlign(max_iter=5),
    ):
        scores = longtail.evaluate(method.fit(outputs).transform(outputs), outputs.labels, outputs.class_counts)
        assert 0 <= scores.balanced <= 1
    wrapped = CalibratedLongTail(LogisticRegression(max_iter=300), cv=2).fit(images.numpy(), labels.numpy())
    assert wrapped.score(images.numpy(), labels.numpy()) > 0.8


def commands() -> None:
    """Every command that needs no extra; one line and exit code 2 where an extra is missing."""
    np.savez("logits.npz", logits=np.eye(3)[[0, 0, 0, 1, 1, 2]] + 0.3, labels=[0, 0, 0, 1, 1, 2])
    for words in (
        "--version",
        "methods",
        "distribution digits-lt",
        "train digits-lt --iterations 20 --device cpu --out run",
        "extract run --split validation --device cpu --out outputs.safetensors --overwrite",
        "calibrate run --device cpu",
        "evaluate run/marc --device cpu",
        "diagnose run",
        "export run/marc --format safetensors --out exported",
        "export run/marc --format npz --out head.npz",
        "compare digits-lt --iterations 2 --device cpu --methods softmax marc --seeds 0 --out compared",
        "calibrate logits.npz --test logits.npz --out calibrated",
        "train --help",
        "completion bash",
    ):
        try:
            code = main(words.split())
        except SystemExit as ended:
            code = int(ended.code or 0)
        assert code == 0, f"longtail {words}: exit code {code}"


if __name__ == "__main__":
    models()
    commands()
    print("longtail works here", file=sys.stderr)
