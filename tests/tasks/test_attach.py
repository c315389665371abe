"""A method behind a model: the same call, calibrated logits, and it can be exported."""

import numpy as np
import pytest
import torch
from torch import nn

import longtail
from longtail.errors import UserError

LABELS = torch.tensor([0] * 60 + [1] * 25 + [2] * 10 + [3] * 6)
X = torch.randn(101, 6, generator=torch.Generator().manual_seed(0)) + LABELS.unsqueeze(1)
UNSEEN = torch.randn(101, 6, generator=torch.Generator().manual_seed(1)) + LABELS.unsqueeze(1)


def network(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4))


@pytest.fixture(scope="module")
def attached():
    model = network()
    method = longtail.MARC().fit(longtail.extract(model, [(X, LABELS)], device="cpu"))
    return longtail.attach(model, method).eval()


def test_it_is_exported_as_a_program(attached):
    program = torch.export.export(attached, (X,))
    torch.testing.assert_close(program.module()(X), attached(X))


def test_it_is_saved_with_its_numbers(attached):
    empty = longtail.attach(network(), longtail.posthoc.LogitAdjustment().fit(np.eye(4) * 2, [0, 1, 2, 3]))
    empty.load_state_dict(attached.state_dict())
    torch.testing.assert_close(empty(X), attached(X))


@pytest.mark.parametrize("width", [8, 4])
def test_what_was_fitted_with_features_is_refused(width):
    """Four features look like four logits: nothing but the check would notice."""
    model = network(width)
    train = longtail.extract(model, [(X, LABELS)], device="cpu")
    known = {"split": "validation", "class_counts": train.class_counts, "device": "cpu"}
    held_out = longtail.extract(model, [(UNSEEN, LABELS)], **known)
    for method in (longtail.posthoc.CRT().fit(train), longtail.HALO().fit(train, validation=held_out)):
        with pytest.raises(UserError, match=r"sees only logits \(\w+ needs features .* fit it on logits"):
            longtail.attach(model, method)
    alone = longtail.HALO().fit(train.logits, train.labels, validation=(held_out.logits, held_out.labels))
    logits = model(X).detach()
    torch.testing.assert_close(longtail.attach(model, alone)(X).detach(), alone.transform(logits), rtol=1e-4, atol=1e-4)
