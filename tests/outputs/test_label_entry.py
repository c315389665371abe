"""Batches of more than two entries: the labels are known for sure, or asked for."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

import longtail
from longtail.errors import UserError

from .conftest import made

GENERATOR = torch.Generator().manual_seed(0)
SIZE = 30
X = torch.randn(SIZE, 6, generator=GENERATOR)
Y = torch.arange(SIZE) % 4 % 3
DOMAIN = torch.arange(SIZE) % 2
COUNTS = torch.bincount(Y).tolist()
SEVERAL = (
    "of the 3 entries of a batch or sample, 1, 2 .numbered from 0. could all be the labels; make it .inputs, labels."
)


def net(forward=lambda self, x: self.fc(x)):
    return made("Net", forward, fc=nn.Linear(6, 3))


class Listed(Dataset):
    """Samples (image, domain, label), (image, label, index) or dictionaries, with a list of the labels or without."""

    def __init__(self, make, **lists):
        self.make = make
        for name, values in lists.items():
            setattr(self, name, values)

    def __len__(self):
        return SIZE

    def __getitem__(self, place):
        return self.make(place)


class Workers(Listed):
    """Read by batches alone: a single sample cannot be asked for."""

    def __getitem__(self, place):
        raise RuntimeError("no file is open")

    def __getitems__(self, places):
        return [self.make(place) for place in places]


def domains(place):
    return X[place], int(DOMAIN[place]), int(Y[place])


def numbered(place):
    return X[place], Y[place], place


def named(place):
    return {"x": X[place], "target": int(DOMAIN[place]), "label": int(Y[place])}


def extracted(loader, model=None):
    return longtail.extract(model or net(), loader, device="cpu").labels


Sample = namedtuple("Sample", "x domain label")

TAKEN = {
    "domain, with a list": DataLoader(Listed(domains, targets=Y.tolist()), 8),
    "domain, with a list, as a part": DataLoader(Subset(Listed(domains, targets=Y.tolist()), range(SIZE)), 8),
    "index, with a list": DataLoader(Listed(numbered, labels=Y.numpy()), 8),
    "names, with a list": DataLoader(Listed(named, targets=Y), 8),
    "the data set itself": Listed(domains, targets=Y),
    "paths": [(X, Y, [f"{place}.png" for place in range(SIZE)])],
    "weights": [(X, Y, torch.linspace(0.1, 0.9, SIZE))],
    "features": [(X, Y, X.cos())],
    "the same twice": [(X, Y, Y.clone())],
    "names of a tuple": [Sample(X, DOMAIN, Y)],
    "names, one of them text": [{"x": X, "label": ["cat"] * SIZE, "labels": Y}],
    "features between": [(X, X.cos(), Y)],
}


@pytest.mark.parametrize("name", TAKEN)
def test_labels_are_taken_where_they_can_be_told(name):
    assert extracted(TAKEN[name]).tolist() == Y.tolist()


ASKED = {
    "domain": (DataLoader(Listed(domains), 8), SEVERAL),
    "tensors": (DataLoader(TensorDataset(X, DOMAIN, Y), 8), SEVERAL),
    "a list that fits neither": (DataLoader(Listed(domains, targets=[2] * SIZE), 8), SEVERAL),
    "samples that only workers can read": (Workers(domains, targets=Y), SEVERAL),
    "one-hot labels and a number": ([(X, torch.eye(3)[Y], torch.arange(SIZE))], SEVERAL),
    "labels that are not whole and a number": ([(X, Y.float(), torch.arange(SIZE))], SEVERAL),
    "names": (
        DataLoader(Listed(named), 8),
        "'label', 'target' .numbered from 0. could all be the labels; keep one of them",
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_labels_that_cannot_be_told_are_asked_for(name):
    loader, message = ASKED[name]
    with pytest.raises(UserError, match=message) as refused:
        longtail.calibrate(net(), loader, device="cpu")
    assert "\n" not in str(refused.value)


def test_what_the_advice_says_helps():
    tensors = TensorDataset(X, DOMAIN, Y)
    tensors.targets = Y
    assert extracted(DataLoader(tensors, 8)).tolist() == Y.tolist()
    assert extracted([((X,), Y)]).tolist() == Y.tolist()
    assert extracted([{"x": X, "labels": Y, "domain": DOMAIN}]).tolist() == Y.tolist()


def test_entries_before_the_labels_go_into_a_model_that_needs_them():
    model = net(lambda self, x, more: self.fc(x + more))
    outputs = longtail.extract(model, [(X, X.cos(), Y)], device="cpu")
    torch.testing.assert_close(torch.from_numpy(outputs.logits), model(X, X.cos()).detach())
    with pytest.raises(UserError, match="2 entries before its labels, and Net takes x, more: which go into it"):
        extracted([(X, X.cos(), Y)], net(lambda self, x, more=None: self.fc(x)))


@pytest.mark.parametrize("make", [domains, numbered, named])
def test_class_counts_follow_the_same_rule(make):
    assert longtail.class_counts(Listed(make, targets=Y)).tolist() == COUNTS
    with pytest.raises(UserError, match="could all be the labels"):
        longtail.class_counts(Listed(make))
    with pytest.raises(UserError, match="could all be the labels"):
        longtail.class_counts(DataLoader(Listed(make), 8))


def test_a_sampler_with_weights_counts_the_labels_and_not_the_domains():
    weights = WeightedRandomSampler(np.ones(SIZE), 60)
    listed = DataLoader(Listed(domains, targets=Y), 8, sampler=weights)
    assert longtail.extract(net(), listed, device="cpu").class_counts.tolist() == COUNTS
    wrong = DataLoader(Listed(lambda place: (X[place], Y[place]), targets=2 - Y), 8, sampler=weights)
    with pytest.raises(UserError, match="pass class_counts="):
        longtail.extract(net(), wrong, device="cpu")
