"""Class counts of anybody's data set, loader or labels."""

import random
from contextlib import suppress

import numpy as np
import pandas
import pytest
import torch
from datasets import ClassLabel, Features, Value
from datasets import Dataset as Table
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import longtail
from longtail.data.labels import dataset_labels
from longtail.errors import UserError

LABELS = [0, 0, 2, 0, 1, 2, 0, 1]
COUNTS = [4, 2, 2]


class Pictures(Dataset):
    """Samples (image, label); how often they are read is counted, and reading draws random numbers."""

    def __init__(self, given=LABELS, **attributes):
        self.given, self.reads = given, 0
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self):
        return len(self.given)

    def __getitem__(self, place):
        if not 0 <= place < len(self.given):
            raise IndexError(place)
        self.reads += 1
        return torch.rand(3, 4, 4) + random.random() + np.random.random(), self.given[place]


class Stream(IterableDataset):
    """The same without places."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Reader:
    """What timm's data sets have inside."""

    def __init__(self):
        self.samples = [(f"{place}.png", label) for place, label in enumerate(LABELS)]
        self.class_to_idx = {name: place for place, name in enumerate("abcd")}


def counts(source, **settings):
    found = longtail.class_counts(source, **settings)
    assert found.dtype == torch.int64
    return found.tolist()


@pytest.mark.parametrize(
    "attributes",
    [
        {"targets": torch.tensor(LABELS)},
        {"labels": np.array(LABELS, dtype=np.uint8)[:, None]},
        {"_labels": LABELS},
        {"y": LABELS},
        {"_samples": Reader().samples},
        {"reader": Reader(), "classes": list("abc")},
        {"targets": [str(label) for label in LABELS], "samples": Reader().samples},
    ],
)
def test_labels_that_are_ready_are_counted_without_reading_all_samples(attributes):
    pictures = Pictures(**attributes)
    assert counts(pictures) == COUNTS
    assert pictures.reads == 3
    assert counts(Subset(pictures, [0, 4, 5])) == [1, 1, 1]
    assert counts(ConcatDataset([pictures, Subset(pictures, [1, 2])])) == [5, 2, 3]
    assert counts(DataLoader(pictures, batch_size=3, drop_last=True)) == COUNTS


def test_the_classes_that_a_data_set_names_are_counted_too():
    assert counts(Pictures(targets=LABELS, classes=list("abcde"))) == [*COUNTS, 0, 0]
    assert counts(Pictures(classes=("a", "b", "c", "d"))) == [*COUNTS, 0]
    assert counts(Pictures(reader=Reader())) == [*COUNTS, 0]
    named = Pictures(targets=LABELS, class_to_idx={name: place for place, name in enumerate("abcd")})
    assert counts(Subset(named, [0])) == [1, 0, 0, 0]
    assert counts(ConcatDataset([named, Pictures(classes=list("abcde"))])) == [8, 4, 4, 0, 0]
    assert counts(ConcatDataset([named, Pictures()])) == [8, 4, 4]
    assert counts(Pictures(targets=LABELS), num_classes=4) == [*COUNTS, 0]
    assert counts(Pictures(classes="abcde")) == COUNTS  # not a list of names
    assert counts(Pictures(classes=["a", "b"]), num_classes=3) == COUNTS
    for number, message in ((2, "num_classes is 2, but there are labels up to 2"), (0, "a whole number of at least 1")):
        with pytest.raises(UserError, match=message):
            longtail.class_counts(LABELS, num_classes=number)


def test_a_changed_target_is_counted_as_it_is_changed():
    """torchvision's target_transform: 0, 1 → 0 and 2 → 1, for which the names are no longer those."""
    pictures = Pictures([label // 2 for label in LABELS], targets=LABELS, classes=list("abc"))
    pictures.target_transform = lambda label: label // 2
    assert counts(pictures) == [6, 2]
    assert pictures.reads == 3
    tensor = Pictures([label // 2 for label in LABELS], targets=torch.tensor(LABELS))
    tensor.target_transform = {0: 0, 1: 0, 2: 1}.__getitem__
    assert counts(tensor) == [6, 2]
    assert tensor.reads == 3


@pytest.mark.parametrize("place", [0, 4, 7])
def test_labels_that_the_samples_do_not_have_are_not_believed(place):
    stale = list(LABELS)
    stale[place] = (stale[place] + 1) % 3
    pictures = Pictures(LABELS, targets=stale, classes=list("abcdef"))
    assert counts(pictures) == COUNTS
    assert pictures.reads >= 8


def test_samples_are_read_where_nothing_is_ready():
    pictures = Pictures()
    assert dataset_labels(pictures) is None
    assert counts(pictures) == COUNTS
    assert pictures.reads == 8
    for label in (torch.tensor(1), np.int32(1), torch.tensor([1]), np.array([[1]])):
        assert counts(Pictures([label])) == [0, 1]
    assert counts(Subset(pictures, [0, 2])) == [1, 0, 1]
    assert counts([pictures[place] for place in range(8)]) == COUNTS
    assert counts(DataLoader([pictures[place] for place in range(8)], batch_size=3)) == COUNTS


def test_the_data_set_is_counted_not_the_sampler():
    weights = [1 / COUNTS[label] for label in LABELS]
    pictures = TensorDataset(torch.zeros(8, 3), torch.tensor(LABELS))
    for sampler in (WeightedRandomSampler(weights, 100), [0, 0, 0]):
        loader = DataLoader(pictures, batch_size=4, sampler=sampler)
        assert counts(loader) == COUNTS
    part, rest = random_split(pictures, [5, 3])
    total = np.add(counts(DataLoader(part), num_classes=3), counts(DataLoader(rest), num_classes=3))
    assert total.tolist() == COUNTS

    class Around:
        """A loader around a loader, as timm has one."""

        def __init__(self, dataset):
            self.dataset = dataset

        def __iter__(self):
            return iter(loader)

    assert counts(Around(pictures)) == COUNTS
    assert counts(Around(loader)) == COUNTS


def test_a_data_set_made_of_another_may_change_its_labels():
    class Halved:
        """Not even a torch `Dataset`: a loader takes it as it is."""

        def __init__(self, dataset):
            self.dataset = dataset

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, place):
            image, label = self.dataset[place]
            return image, label // 2

    class HalvedStream(IterableDataset):
        def __init__(self, dataset):
            self.dataset = dataset

        def __iter__(self):
            return ((image, label // 2) for image, label in self.dataset)

    for made in (Halved(Pictures(targets=LABELS)), HalvedStream(Pictures(targets=LABELS))):
        assert counts(made) == [6, 2]
        assert counts(DataLoader(made, batch_size=3)) == [6, 2]


def test_what_can_only_be_iterated_is_iterated():
    samples = [(torch.zeros(3, 4, 4), label) for label in LABELS]
    assert counts(Stream(samples)) == COUNTS
    assert counts(DataLoader(Stream(samples), batch_size=3)) == COUNTS
    assert counts(DataLoader(Stream(samples), batch_size=None)) == COUNTS
    batches = list(DataLoader(samples, batch_size=3))
    named = [{"pixel_values": images, "labels": labels} for images, labels in batches]
    for source in (batches, tuple(batches), iter(batches), DataLoader(Stream(batches), batch_size=None), iter(named)):
        assert counts(source) == COUNTS
    data = longtail.data.open_splits("digits-lt")
    assert counts(data) == data.train.class_counts.tolist()


def test_tables_of_hugging_face():
    named = Features({"x": Value("int32"), "label": ClassLabel(names=list("abcd"))})
    table = Table.from_dict({"x": range(8), "label": LABELS}, features=named)
    assert counts(table) == [*COUNTS, 0]
    assert counts(table.with_format("torch")) == [*COUNTS, 0]
    assert counts(table.with_transform(lambda rows: {"nothing": rows["x"]})) == [*COUNTS, 0]
    assert counts(table.select([0, 2])) == [1, 0, 1, 0]
    assert counts(DataLoader(table.with_format("torch"), batch_size=3)) == [*COUNTS, 0]
    assert counts(table.to_iterable_dataset()) == COUNTS
    assert counts(DataLoader(table.to_iterable_dataset().with_format("torch"), batch_size=3)) == COUNTS
    fine = Table.from_dict({"coarse_label": [0] * 8, "fine_label": LABELS})
    assert counts(fine) == COUNTS
    assert counts(fine["coarse_label"]) == [8]
    with pytest.raises(UserError, match=r"a dictionary of train, test is not a data set; pass one of its entries"):
        longtail.class_counts(table.train_test_split(0.25))
    with pytest.raises(UserError, match=r"labels are str \('a'\), not class numbers; number the classes from 0 on"):
        longtail.class_counts(Table.from_dict({"label": ["a", "b"]}))
    with pytest.raises(UserError, match="a batch or sample has no labels: its entries are x, z; expected one of"):
        longtail.class_counts(Table.from_dict({"x": [1], "z": [2]}))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_labels_themselves_are_counted(labels):
    expected = [labels.count(c) for c in range(max(labels) + 1)]
    for form in (list, tuple, np.array, torch.tensor, pandas.Series, lambda x: [torch.tensor(label) for label in x]):
        assert counts(form(labels)) == expected
    ready = TensorDataset(torch.zeros(len(labels), 2), torch.tensor(labels))
    assert counts(DataLoader(ready, batch_size=4, shuffle=True)) == expected


def test_random_numbers_of_the_caller_stay_as_they_were():
    def draw():
        return random.random(), np.random.random(), torch.rand(1).item()

    def seed():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    seed()
    expected = draw()
    for source in (Pictures(), Pictures(targets=LABELS), (Pictures()[0] for _ in range(3)), DataLoader(Stream(LABELS))):
        seed()
        with suppress(UserError):  # the last two are read and refused
            longtail.class_counts(source)
        assert draw() == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Pictures(["cat", "dog"]), r"labels are str \('cat'\), not class numbers; number the classes from 0 on"),
        (Pictures([{"boxes": 3}]), r"labels are dict \(.*\), not class numbers"),
        (torch.tensor([0.0, 2.0]), r"not float32 of shape \(2,\); convert them to whole numbers"),
        (torch.eye(3).long(), r"not int64 of shape \(3, 3\); if every sample has exactly one 1, argmax\(1\)"),
        (Pictures(list(1 - torch.eye(3).long())), "samples with several classes, or none, have no class counts"),
        (Pictures([torch.zeros(4, 4).byte() + 7]), r"not uint8 of shape \(1, 16\): several numbers per sample"),
        ([(torch.zeros(3, 4), torch.tensor([1, 0]))], "exactly one 1"),  # one sample: 3 rows, 2 labels
        ([[1, 2], [0]], "different numbers of labels|sample"),
        (torch.tensor(3), r"not int64 of shape \(\)"),
        (Pictures([0, 1, -1]), "sample 2 has the label -1, but classes are numbered from 0 on; leave out samples"),
        (Stream([]), "there are no samples to count"),
        (Stream([torch.zeros(3)]), r"sample must be \(inputs, labels\) or a dictionary with labels, not Tensor"),
        (iter([(torch.zeros(3), 5)]), r"a batch must be \(inputs, labels\) with one label per sample, not \(\) labels"),
        (7, "a int has no samples to count; pass a data set, a loader or labels"),
        (Pictures(classes=["a", "b"]), "the number of class names of the data set is 2, but there are labels up to 2"),
    ],
)
def test_what_cannot_be_counted_is_named(source, message):
    with pytest.raises(UserError, match=message) as caught:
        longtail.class_counts(source)
    assert "\n" not in str(caught.value)
