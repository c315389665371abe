"""Somebody else's distributed job: every process gets the model of one process with all of the data."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import longtail
from longtail.errors import UserError

SCRIPT = Path(__file__).with_name("any_model_work.py")


def load():
    spec = importlib.util.spec_from_file_location("any_model_work", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


work = load()


@pytest.fixture(scope="module")
def ranks(torchrun, tmp_path_factory):
    """What each of two processes got."""
    out = tmp_path_factory.mktemp("any-model")
    torchrun(SCRIPT, out)
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def data():
    return TensorDataset(*work.samples())


def alone(data, method=None, validation=None):
    """One process with all of the data."""
    held_out = None if validation is None else DataLoader(validation, 8)
    found = longtail.calibrate(work.network(), DataLoader(data, 8), method, validation=held_out, device="cpu")
    return work.result(*found)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", ["sampler", "shuffled", "whole", "list", "stream", "subset", "buffers", "accelerate"])
def test_every_process_gets_the_model_of_one(ranks, data, name):
    """Uneven parts, padding, shuffled parts, all of the data on each, statistics that differ."""
    assert_same(ranks[0][name], ranks[1][name])
    assert_same(ranks[0][name], alone(data))


def test_a_padded_sample_would_be_noticed(data):
    """Two parts of 101 samples are 51 each: the sampler shows the first once more."""
    twice = alone(Subset(data, [*range(work.SIZE), 0]))
    assert (twice["scale_"] - alone(data)["scale_"]).abs().max() > 1e-5


METHODS = {
    "auto": longtail.MARC(gamma="auto"),
    "crt": longtail.posthoc.CRT(ridge=0.01),
    "disalign": longtail.posthoc.DisAlign(max_iter=5),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_choose_train_or_need_features(ranks, data, name):
    validation = work.unseen() if name == "auto" else None
    assert_same(ranks[0][name], ranks[1][name])
    assert_same(ranks[0][name], alone(data, METHODS[name], validation))


def test_several_labels_per_sample(ranks):
    assert_same(ranks[0]["several labels"], ranks[1]["several labels"])
    assert_same(ranks[0]["several labels"], alone(work.many_labels(), longtail.posthoc.MultiLabelCalibration()))


def test_the_model_of_each_process_is_left_as_it_is(ranks):
    assert ranks[0]["buffers after"]
    assert ranks[1]["buffers after"]


def test_extracted_rows_are_those_of_one_process(ranks, data):
    one = longtail.extract(work.network(), DataLoader(data, 8), device="cpu")
    for kept in ranks:
        for name in ("logits", "features", "labels", "indices"):
            np.testing.assert_allclose(kept["outputs"][name], getattr(one, name), atol=1e-6)
            np.testing.assert_allclose(kept["mapped"][name], getattr(one, name), atol=1e-6)
        assert kept["outputs"]["class_counts"].tolist() == one.class_counts.tolist()


def test_what_cannot_be_is_refused_by_name(ranks):
    for kept in ranks:
        assert "process 1 holds a model with other weights than process 0" in kept["weights"]
        assert "as many samples of each class, but not the same images" in kept["augmented"]
        for version in ("fsdp", "fsdp 1"):
            assert "is wrapped by FSDP, which cannot be copied" in kept[f"{version} refused"]
            assert "longtail.attach(model, method)" in kept[f"{version} refused"]
    assert "process 1 has not made this call" in ranks[0]["part alone"]
    assert "make the call on every process" in ranks[0]["part alone"]


def test_an_error_of_one_process_ends_all(ranks):
    """None of them waits for another that has stopped."""
    assert ranks[0]["labels of one"].startswith("process 1: labels must be class numbers")
    assert ranks[1]["labels of one"].startswith("labels must be class numbers")
    for kept in ranks:
        assert "cannot be folded into Branch: its output comes from fc for the first samples" in kept["branch of one"]


def test_what_may_count_twice_is_said_once(ranks):
    assert [("DistributedSampler" in text) for text in ranks[0]["said"]] == [True, True]
    assert ranks[1]["said"] == []


def test_one_process_may_work_alone_with_all_of_the_data(ranks, data):
    assert_same(ranks[0]["alone"], alone(data))
    assert ranks[0]["here while alone"] == (1, [])  # who comes later does not wait for its exchanges


@pytest.mark.parametrize("name", ["column", "row", "fsdp", "fsdp 1"])
def test_models_held_in_parts(ranks, data, name):
    """A head cut by rows or columns is calibrated in the same cut; FSDP runs in step, whatever the parts."""
    for kept in ranks:
        torch.testing.assert_close(kept[name]["answer"], kept[name]["expected"], atol=1e-4, rtol=1e-4)
    if name.startswith("fsdp"):
        one = longtail.extract(work.network(), DataLoader(data, 8), device="cpu")
        np.testing.assert_allclose(ranks[0][name]["logits"], one.logits, atol=1e-6)
    else:
        torch.testing.assert_close(ranks[0][name]["scale_"], alone(data)["scale_"], atol=1e-5, rtol=0)


def test_a_sampler_for_several_processes_needs_a_group(data):
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(UserError, match="deals its samples out to 2 processes, and there are 1 in the group; open"):
        longtail.calibrate(work.network(), DataLoader(data, 8, sampler=sampler), device="cpu")
