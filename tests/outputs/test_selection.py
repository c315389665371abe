import datasets
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)

import longtail
from longtail import MARC
from longtail.data.imbalance import ClassSubsample
from longtail.errors import UserError
from longtail.posthoc import TauNorm

Y = torch.repeat_interleave(torch.arange(3), torch.tensor([60, 20, 5]))
X = torch.randn(len(Y), 4, generator=torch.Generator().manual_seed(0)) + Y.unsqueeze(1)


class Pictures(Dataset):
    """As torchvision's sets are: labels in `targets`, samples decoded one by one."""

    def __init__(self, targets=None):
        self.targets = Y.tolist() if targets is None else targets
        self.read = []

    def __len__(self):
        return len(Y)

    def __getitem__(self, row):
        self.read.append(row)
        return X[row], int(Y[row])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Backwards(Sampler):
    """All samples, or the last ones alone."""

    def __init__(self, size=85):
        self.size = size

    def __iter__(self):
        return iter(range(len(Y) - 1, len(Y) - 1 - self.size, -1))


class Unlabelled(Pictures):
    def __init__(self):
        self.read = []


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def test_only_the_chosen_are_read(model):
    pictures = Pictures()
    outputs = longtail.extract(model, pictures, images_per_class=6, seed=2, device="cpu")
    rows = ClassSubsample(6, 2).rows(Y.numpy())
    assert pictures.read == rows.tolist()
    assert outputs.indices.tolist() == rows.tolist()
    assert outputs.labels.tolist() == Y[rows].tolist()
    assert outputs.class_counts.tolist() == [60, 20, 5]
    assert (outputs.images_per_class, outputs.images_seed) == (6, 2)
    np.testing.assert_allclose(outputs.logits, model(X[rows]).detach(), atol=1e-6)


@pytest.mark.parametrize(
    "loader",
    [
        TensorDataset(X, Y),
        datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()}),
        DataLoader(Pictures(), batch_size=7, shuffle=True),
        DataLoader(TensorDataset(X, Y), 7, sampler=Backwards()),
        DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(Backwards(), 7, True)),
        DataLoader(Subset(TensorDataset(X.flip(0), Y.flip(0)), list(range(len(Y) - 1, -1, -1))), batch_size=16),
        DataLoader(
            Pictures(Y),
            collate_fn=lambda rows: {
                "x": torch.stack([x for x, _ in rows]),
                "labels": torch.tensor([y for _, y in rows]),
            },
        ),
    ],
    ids=["TensorDataset", "Hugging Face", "shuffled", "own sampler", "batch sampler", "Subset", "own collate_fn"],
)
def test_every_data_set_that_knows_its_labels(model, loader):
    outputs = longtail.extract(model, loader, images_per_class=6, device="cpu")
    rows = ClassSubsample(6).rows(Y.numpy())
    assert outputs.labels.tolist() == Y[rows].tolist()
    np.testing.assert_allclose(outputs.logits, model(X[rows]).detach(), atol=1e-5)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (Stream(), "a Stream cannot skip samples"),
        ([(X, Y)], "a list cannot skip samples"),
        (Unlabelled(), "the labels of a Unlabelled are not known before it is read"),
        (Pictures(targets=Y.flip(0).tolist()), "not those that the data set lists"),
        (
            DataLoader(TensorDataset(X, Y), 7, sampler=RandomSampler(Y, replacement=True, num_samples=20)),
            "a RandomSampler, which does not show every sample once",
        ),
        (DataLoader(TensorDataset(X, Y), sampler=Backwards(80)), "a Backwards, which does not show every sample once"),
        (DataLoader(Pictures(), batch_size=None), "the loader has no batch size"),
        (TensorDataset(X[:0], Y[:0]), "a TensorDataset without samples has none to choose"),
        (Pictures(targets=[-1, *Y[1:].tolist()]), "sample 0 has the label -1, but classes are numbered from 0 on"),
    ],
)
def test_what_cannot_skip_or_does_not_know_its_labels_says_so(model, loader, message):
    with pytest.raises(UserError, match=message):
        longtail.extract(model, loader, images_per_class=6, device="cpu")
    if "batches" not in message and "lists" not in message:  # known before the model is run
        with pytest.raises(UserError, match=message):
            longtail.calibrate(model, loader, images_per_class="auto", device="cpu")


def test_calibrate_takes_what_the_method_needs(model):
    pictures = Pictures()
    _, few = longtail.calibrate(model, pictures, MARC(), images_per_class=8, device="cpu")
    assert len(pictures.read) == 8 + 8 + 5
    _, everything = longtail.calibrate(model, TensorDataset(X, Y), MARC(), device="cpu")
    assert few.result_.converged
    assert not np.allclose(few.omega_, everything.omega_, rtol=1e-3)
    # No class has as many images as MARC asks for at three classes: auto takes them all.
    _, auto = longtail.calibrate(model, pictures, MARC(), images_per_class="auto", device="cpu")
    np.testing.assert_allclose(auto.omega_, everything.omega_, rtol=1e-3)
    pictures.read.clear()
    longtail.calibrate(model, pictures, TauNorm(tau=1.0), images_per_class="auto", device="cpu")
    assert len(pictures.read) == 3
    pictures.read.clear()
    held_out = TensorDataset(X + 0.1, Y)
    longtail.calibrate(model, pictures, "vector", validation=held_out, images_per_class="auto", device="cpu")
    assert len(pictures.read) == 3  # it is fitted on the held-out samples
    with pytest.raises(UserError, match="unknown images_per_class 'some'"):
        longtail.calibrate(model, pictures, images_per_class="some", device="cpu")
    with pytest.raises(UserError, match="a whole number or 'all', not 'auto'; how many are enough"):
        longtail.extract(model, pictures, images_per_class="auto", device="cpu")
