"""What every network that changes more than the loss must do: any backbone, any size, save, resume, evaluate."""

from dataclasses import replace

import pytest
import torch

import longtail
from longtail.backbones import build_backbone
from longtail.data.loading import Batch
from longtail.errors import UserError
from longtail.heads.fold import head_of
from longtail.methods import TRAIN_METHODS
from longtail.networks.objective import Progress
from longtail.recipes import RECIPES

COUNTS = torch.tensor([50, 20, 10, 4, 1])
# The authors' alpha for ten classes; prototypes as they use them there.
OPTIONS = {
    "bbn": {},
    "hybrid-sc": {},
    "hybrid-psc": {"variant": "psc", "temperature": "1"},
    "oltr": {},
    "causal-norm": {"alpha": "1"},
}
METHODS = {name: name.replace("psc", "sc") for name in OPTIONS}
FAMILIES = {"digits": (1, (8, 8)), "resnet8": (3, (19, 26)), "resnet10": (3, (65, 70))}


def build(name, backbone="digits", channels=1):
    torch.manual_seed(0)
    return TRAIN_METHODS[METHODS[name]].build(build_backbone(backbone, channels), COUNTS, OPTIONS[name])


def batches(name, channels=1, size=(8, 8), count=4):
    generator = torch.Generator().manual_seed(3)
    streams = TRAIN_METHODS[METHODS[name]].samplers
    labels = {sampler: torch.randint(5, (count,), generator=generator) for sampler in set(streams)}
    shape = (count, channels, *size)
    return [Batch(torch.randn(shape, generator=generator), labels[sampler], torch.arange(count)) for sampler in streams]


@pytest.mark.parametrize("backbone", FAMILIES)
@pytest.mark.parametrize("name", OPTIONS)
def test_works_on_every_family_of_backbones_and_odd_sizes(name, backbone):
    channels, size = FAMILIES[backbone]
    model, objective = build(name, backbone, channels)
    for step in (0, 5):  # both halves of a run
        loss = objective(model.train(), batches(name, channels, size), Progress(step, 10, step // 2, 5))
        loss.backward()
        assert loss.isfinite()
        # Processes that train together wait for a gradient of every parameter.
        for path, parameter in [*model.named_parameters(), *objective.named_parameters()]:
            assert parameter.grad is not None, path
            assert parameter.grad.isfinite().all(), path
            parameter.grad = None
    images = torch.randn(3, channels, *size)
    with torch.inference_mode():
        features, logits = model.eval().features(images), model(images)
        torch.testing.assert_close(head_of(model)(features), logits)
    assert logits.shape == (3, 5)
    assert features.ndim == 2


def config(name, **changes):
    return replace(RECIPES["digits-lt"], device="cpu", method=METHODS[name], options=OPTIONS[name], **changes)


@pytest.mark.parametrize("name", OPTIONS)
def test_half_precision_and_parts_of_a_batch(name, tmp_path):
    changes = {"precision": "bf16", "accumulate": 2, "epochs": None, "iterations": 4}
    metrics = longtail.train(config(name, **changes), tmp_path / "run")
    assert metrics is not None


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("causal-norm", {"heads": "3"}, "heads must divide the 64 features"),
        ("causal-norm", {"heads": "0"}, "heads must be a whole number of at least 1, not 0"),
        ("causal-norm", {"gamma": "-1"}, "gamma must be a number, at least 0, not -1"),
        ("causal-norm", {"alpha": "big"}, "alpha must be a number, finite, not 'big'"),
        ("oltr", {"grid": "0"}, "grid must be a whole number of at least 1, not 0"),
        ("oltr", {"scale": "x"}, "scale must be a number, at least 0, not 'x'"),
        ("oltr", {"centroid_weight": "-1"}, "centroid_weight must be a number, at least 0, not -1"),
        ("hybrid-sc", {"variant": "pcs"}, "unknown variant 'pcs'; choose from: sc, psc"),
        ("hybrid-sc", {"projection": "0"}, "projection must be a whole number"),
        ("hybrid-sc", {"temperature": "0"}, "temperature must be a number"),
    ],
)
def test_wrong_options_are_named(method, options, message):
    with pytest.raises(UserError, match=message):
        TRAIN_METHODS[method].build(build_backbone("digits", 1), COUNTS, options)
