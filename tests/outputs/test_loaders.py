"""Loaders that do not show every sample once: how many training samples a class has is asked of the data set."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import longtail
from longtail.errors import UserError
from longtail.outputs.loaders import sampler_info, training_counts

COUNTS = [60, 25, 10, 5]
LABELS = torch.arange(4).repeat_interleave(torch.tensor(COUNTS))
LABELS = LABELS[torch.randperm(100, generator=torch.Generator().manual_seed(0))]
IMAGES = torch.randn(100, 6, generator=torch.Generator().manual_seed(1)) + LABELS.unsqueeze(1)
WEIGHTS = 1 / torch.tensor(COUNTS)[LABELS]


class Silent(Dataset):
    """Does not hold its labels ready."""

    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        return IMAGES[index], int(LABELS[index])


class Folder(Silent):
    """Holds its labels as torchvision's data sets do."""

    targets = LABELS.tolist()


class Renamed(Folder):
    """Its classes are other ones than its list says."""

    target_transform = staticmethod(lambda label: 3 - label)


class Balanced(Sampler):
    """A batch sampler: as many samples of each class in each batch, for ever if it is not told when to stop."""

    def __init__(self, batches=40):
        self.batches = batches

    def __iter__(self):
        places = [torch.nonzero(label == LABELS).flatten() for label in range(4)]
        number = 0
        while self.batches is None or number < self.batches:
            yield [int(own[torch.randint(len(own), ())]) for own in places for _ in range(4)]
            number += 1


class Failing(Sampler):
    """Cannot be asked twice."""

    def __iter__(self):
        raise RuntimeError("not now")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def weighted(dataset, weights=WEIGHTS, size=400):
    return DataLoader(dataset, 16, sampler=WeightedRandomSampler(weights, size))


PLAIN = TensorDataset(IMAGES, LABELS)
HALF = LABELS[::2].bincount(minlength=4).tolist()
KNOWN = {
    "tensors": (lambda: weighted(PLAIN), COUNTS),
    "targets": (lambda: weighted(Folder()), COUNTS),
    "a part": (lambda: weighted(Subset(PLAIN, range(0, 100, 2)), WEIGHTS[::2]), HALF),
    "two sets": (lambda: weighted(ConcatDataset([PLAIN, PLAIN]), WEIGHTS.repeat(2)), [2 * count for count in COUNTS]),
    "weights of zero": (lambda: weighted(PLAIN, WEIGHTS * (torch.arange(100) % 2 == 0)), HALF),
    "batches by class": (lambda: DataLoader(PLAIN, batch_sampler=Balanced()), COUNTS),
    "with replacement": (lambda: DataLoader(PLAIN, 16, sampler=RandomSampler(PLAIN, True, 300)), COUNTS),
    "last batch left out": (lambda: DataLoader(PLAIN, 16, shuffle=True, drop_last=True), COUNTS),
    "some of them": (lambda: DataLoader(Silent(), 16, sampler=SubsetRandomSampler(range(0, 100, 2))), HALF),
    "a batch sampler": (lambda: DataLoader(Silent(), batch_sampler=BatchSampler(range(0, 100, 2), 7, False)), HALF),
    "weights in a batch sampler": (
        lambda: DataLoader(PLAIN, batch_sampler=BatchSampler(WeightedRandomSampler(WEIGHTS, 400), 16, False)),
        COUNTS,
    ),
    "some, last left out": (
        lambda: DataLoader(PLAIN, 16, sampler=SubsetRandomSampler(range(0, 100, 2)), drop_last=True),
        HALF,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_counts_are_those_of_the_training_set(name):
    make, expected = KNOWN[name]
    torch.manual_seed(0)
    assert longtail.extract(network(), make(), device="cpu").class_counts.tolist() == expected


@pytest.mark.parametrize("dataset", [Silent(), Renamed()], ids=["labels unknown", "labels changed"])
@pytest.mark.parametrize("make", [weighted, lambda data: DataLoader(data, batch_sampler=Balanced())])
def test_counts_that_are_not_known_are_asked_for(dataset, make):
    torch.manual_seed(0)
    loader = make(dataset)
    with pytest.raises(UserError, match="shows some samples more often than others, .* pass class_counts="):
        longtail.calibrate(network(), loader, device="cpu")
    outputs = longtail.extract(network(), loader, class_counts=COUNTS, device="cpu")
    assert outputs.class_counts.tolist() == COUNTS


def test_marc_on_a_balanced_loader_stands_for_the_training_set():
    """Drawn often enough, samples weighted back give the solution on the set itself; unweighted they do not."""
    torch.manual_seed(0)
    model = network()
    _, expected = longtail.calibrate(model, DataLoader(PLAIN, 100), device="cpu")
    _, method = longtail.calibrate(model, weighted(PLAIN, size=40_000), device="cpu")
    balanced = longtail.extract(model, weighted(PLAIN, size=4_000), device="cpu")
    wrong = longtail.MARC().fit(balanced.logits, balanced.labels, weight_norms=balanced.weight_norms)
    apart = [np.abs(one.shift_ - expected.shift_).max() for one in (method, wrong)]
    assert apart[0] < 0.2 * np.ptp(expected.shift_)
    assert apart[0] < 0.2 * apart[1]


def test_a_class_without_samples_keeps_out_only_what_fits_on_samples():
    """Logit adjustment needs counts alone; MARC would have nothing to fit the class on."""
    seen = [(IMAGES[LABELS < 3], LABELS[LABELS < 3])]
    _, method = longtail.calibrate(
        network(), seen, longtail.posthoc.LogitAdjustment(), class_counts=COUNTS, device="cpu"
    )
    np.testing.assert_allclose(method.shift_, -np.log(np.array(COUNTS) / 100))
    with pytest.raises(UserError, match="class 3 has no sample in labels"):
        longtail.calibrate(network(), seen, class_counts=COUNTS, device="cpu")


def test_samplers_are_only_looked_at():
    """Asking a sampler what it will draw leaves it, and the caller's random numbers, as they were."""
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(PLAIN, 16, sampler=RandomSampler(PLAIN, generator=generator))
    state, own = generator.get_state(), torch.get_rng_state()
    order = sampler_info(loader)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), own)
    assert sorted(order.positions.tolist()) == list(range(100))


@pytest.mark.parametrize("sampler", [Balanced(None), Failing()])
def test_samplers_that_cannot_be_asked(sampler):
    """Endless ones, and those that fail: what is known is the data set alone."""
    order = sampler_info(DataLoader(PLAIN, batch_sampler=sampler))
    assert order.uneven
    assert order.positions is None
    assert training_counts(order, LABELS.numpy()[:40], 4).tolist() == COUNTS
