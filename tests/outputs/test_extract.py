from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import longtail
from longtail import Outputs
from longtail.data.imbalance import ClassSubsample
from longtail.distributed import World
from longtail.errors import UserError
from longtail.metrics.scores import evaluate
from longtail.outputs.inference import forward
from longtail.outputs.record import fingerprint
from longtail.outputs.rows import join_shards, shards_folder
from longtail.runs.folder import Run
from longtail.runs.network import outputs_path, score, write_outputs

from .conftest import made


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.body(x))


X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(X, Y), batch_size=6),
        DataLoader(Stream(), batch_size=6),
        Stream(),
        [(X[:10], Y[:10]), (X[10:], Y[10:])],
        [[X, Y, "ignored"]],
        ((X[i : i + 1], Y[i : i + 1]) for i in range(20)),
    ],
    ids=["DataLoader", "DataLoader of a stream", "stream", "list", "more entries", "generator"],
)
def test_any_loader_gives_features_and_logits_in_evaluation_mode(loader):
    model = Small().train()
    statistics = model.body[1].running_mean.clone()
    outputs = longtail.extract(model, loader, device="cpu")
    assert model.training
    assert torch.equal(model.body[1].running_mean, statistics)
    with torch.inference_mode():
        features = model.eval().body(X)
        logits = model.fc(features)
    np.testing.assert_allclose(outputs.features, features, atol=1e-6)
    np.testing.assert_allclose(outputs.logits, logits, atol=1e-6)
    assert outputs.labels.tolist() == Y.tolist()
    assert outputs.class_counts.tolist() == [7, 7, 6]
    assert outputs.model == fingerprint(model)
    np.testing.assert_array_equal(outputs.head_weight, model.fc.weight.detach())


class WorksInPlace(Small):
    """Answers with log-probabilities and reuses its buffers."""

    def __init__(self):
        super().__init__()
        self.buffer = torch.empty(10, 6)

    def forward(self, x):
        answer = self.fc(input=self.buffer.copy_(self.body(x)))
        answer -= answer.logsumexp(1, keepdim=True)
        return answer


def test_a_model_that_works_in_place():
    model = WorksInPlace().eval()
    loader = [(X[:10], Y[:10]), (X[10:], Y[10:])]
    outputs = longtail.extract(model, loader, device="cpu")
    with torch.no_grad():
        features = torch.cat([model.body(x) for x, _ in loader])
        np.testing.assert_allclose(outputs.features, features, atol=1e-6)
        np.testing.assert_allclose(outputs.logits, model.fc(features), atol=1e-6)


def test_outputs_stream_to_a_file_and_are_mapped(tmp_path):
    model = Small().eval()
    loader = [(X[:12], Y[:12]), (X[12:], Y[12:])]
    path = tmp_path / "new" / "outputs.safetensors"
    mapped = longtail.extract(model, loader, path, device="cpu")
    kept = longtail.extract(model, loader, device="cpu")
    for name in ("features", "logits", "labels", "indices", "class_counts", "head_weight", "head_bias"):
        np.testing.assert_array_equal(getattr(mapped, name), getattr(kept, name))
    assert Outputs.open(path, model=fingerprint(model)).model == kept.model
    assert [file.name for file in path.parent.iterdir()] == ["outputs.safetensors"]
    half = longtail.extract(model, loader, tmp_path / "half.safetensors", dtype="float16", device="cpu")
    assert half.logits.dtype == half.features.dtype == np.float16


def test_numbers_too_large_for_half_precision_are_named():
    model = Small().eval()
    model.fc.weight.data.mul_(1e6)
    with pytest.raises(UserError, match=r"logits up to .* do not fit into float16; store float32"):
        longtail.extract(model, [(X, Y)], dtype="float16", device="cpu")


def test_the_model_goes_back_to_its_device():
    model = Small()
    model.to = lambda device: moves.append(str(device)) or model  # there is only one device here
    moves = []
    longtail.extract(model, [(X, Y)], device="cpu")
    with pytest.raises(UserError):
        longtail.extract(model, [], device="cpu")
    assert moves == ["cpu", "cpu", "cpu", "cpu"]


def small(forward, **layers):
    """`Small` with another `forward(self, x)`, in which `self.fc(self.body(x))` gives the logits."""
    return made("Small", forward, body=nn.Linear(4, 6), fc=nn.Linear(6, 3), **layers)


def with_features(model, x):
    """The features, which a linear layer gives too, and the logits."""
    features = model.body(x)
    return features, model.fc(features)


def with_rotation(model, x):
    return {"pred": model.fc(model.body(x)), "rotation": model.head(model.body(x))}


def test_of_several_outputs_the_caller_names_one():
    outputs = longtail.extract(small(with_features), [(X, Y)], head="fc", device="cpu")
    assert outputs.logits.shape == (20, 3)


@pytest.mark.parametrize(
    ("model", "loader", "message"),
    [
        (Small(), [], "no batches"),
        (Small(), [X], "must be \\(inputs, labels\\)"),
        (Small(), [{"x": X}], "has no labels: its entries are x"),
        (Small(), [(X, Y + 1)], r"gives labels 1\.\.3, the model has classes 0\.\.2"),
        (small(with_features), [(X, Y)], r"several layers \(body, fc\); name the classifier with head="),
        (small(with_rotation, head=nn.Linear(6, 3)), [(X, Y)], r"several layers \(fc, head\)"),
        (Small(), [(X * torch.nan, Y)], "returns NaN or inf on the first batch"),
        (small(lambda m, x: m.fc(m.body(x).view(2, -1, 6)).mean(1)), [(X, Y)], r"returns \(2, 3\) for 20"),
        (small(lambda m, x: 5 - 10 * m.fc(m.body(x))[:, :1]), [(X, Y)], r"labels 0\.\.2, the model has"),
        (small(nn.Module.forward), [(X, Y)], r"Small has no forward that gives logits; .* \(its parts: body, fc\)"),
        (Small(), [(X[:, :3], Y)], "Small fails on the first batch: RuntimeError: mat1 and mat2"),
        (Small().to("meta"), [(X, Y)], r"parameters without numbers \(device meta\); load its weights"),
    ],
)
def test_what_does_not_fit_is_named(model, loader, message):
    with pytest.raises(UserError, match=message):
        longtail.extract(model, loader, device="cpu")


def test_outputs_of_a_run_are_what_the_model_says(digits_copy):
    run = Run.open(digits_copy)
    path = write_outputs(run, "test", outputs_path(run, "test"))
    outputs = Outputs.open(path)
    splits = run.splits
    scored = score(run.model(), run.loader("test"), run.class_counts)
    assert evaluate(outputs.logits, outputs.labels, run.class_counts) == scored
    np.testing.assert_array_equal(outputs.labels, splits.test.labels)
    assert outputs.indices.tolist() == list(range(600))
    assert outputs.class_names == tuple("0123456789")
    assert outputs.class_counts.tolist() == run.class_counts.tolist()
    assert sorted(file.name for file in path.parent.iterdir()) == ["test.safetensors"]


def test_views_are_augmented_anew_and_belong_to_training(digits_copy):
    run = Run.open(digits_copy)
    outputs = run.outputs("train", views=2)
    size = run.split_sizes["train"]
    assert len(outputs) == 2 * size
    assert outputs.views == 2
    assert outputs.indices.tolist() == 2 * list(range(size))
    assert (outputs.logits[:size] != outputs.logits[size:]).any(1).mean() > 0.8
    one = run.outputs("train", views=1)
    np.testing.assert_array_equal(one.logits, outputs.logits[:size])
    with pytest.raises(UserError, match="views must be a whole number of at least 0, not -1"):
        run.outputs("train", views=-1)
    with pytest.raises(UserError, match="views are for the train split"):
        run.outputs("test", views=1)


def test_half_precision_and_features_alone(digits_copy):
    run = Run.open(digits_copy)
    full = run.outputs("test")
    half = Outputs.open(write_outputs(run, "test", digits_copy / "half.safetensors", dtype="float16"))
    assert half.logits.dtype == half.features.dtype == np.float16
    np.testing.assert_allclose(half.logits, full.logits, rtol=2e-3, atol=1e-2)
    alone = Outputs.open(write_outputs(run, "test", digits_copy / "features.safetensors", keep_logits=False))
    assert alone.logits is None
    np.testing.assert_allclose(alone.rows().read(slice(None)), full.logits, atol=1e-4)


def join(path, numbers, monkeypatch):
    """Join the shards of several processes, whose rows have these numbers and hold them, as rank 0 does."""
    for rank, of_rank in enumerate(numbers):
        folder = shards_folder(path) / str(rank)
        folder.mkdir(parents=True)
        (of_rank[:, None] * np.ones(3, np.float32)).astype(np.float32).tofile(folder / "logits")
    kinds = {"logits": (np.dtype(np.float32), (3,))}
    monkeypatch.setattr(World, "gather", lambda self, value: [(of_rank, kinds) for of_rank in numbers])
    monkeypatch.setattr(World, "barrier", lambda self: None)
    world = World(0, len(numbers), torch.device("cpu"))
    return join_shards(path, {}, numbers[0], {"class_counts": np.ones(3)}, {}, world, np.arange(5))


def test_rows_missing_or_written_twice_are_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="sample 1 was written twice"):
        join(tmp_path / "twice.safetensors", [np.array([0, 1]), np.array([1, 2])], monkeypatch)
    monkeypatch.setattr("longtail.outputs.rows.shards_folder", lambda path: path.with_name("elsewhere"))
    with pytest.raises(UserError, match=r"rows of a process are missing: .*elsewhere.*; all processes must write"):
        join(tmp_path / "two.safetensors", [np.array([0, 1]), np.array([2, 3])], monkeypatch)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("of_a_run", [True, False])
def test_an_interrupted_extraction_leaves_nothing(of_a_run, digits_copy, monkeypatch):
    def broken(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr("longtail.outputs.inference.forward", broken)
    path = digits_copy / "outputs" / "test.safetensors"
    run = Run.open(digits_copy)
    with pytest.raises(KeyboardInterrupt):
        run.outputs("test") if of_a_run else longtail.extract(Small(), [(X, Y)], path, device="cpu")
    assert list((digits_copy / "outputs").iterdir()) == []


def test_images_per_class_are_read_and_no_others(digits_copy, monkeypatch):
    run, few = Run.open(digits_copy), ClassSubsample(7, seed=3)
    chosen = {"images_per_class": 7, "seed": 3}
    whole = run.outputs("train")
    samples = []

    def counting(model, batch, head):
        samples.extend([] if batch.indices is None else batch.labels)
        return forward(model, batch, head)

    monkeypatch.setattr("longtail.outputs.inference.forward", counting)
    outputs = run.outputs("train", **chosen)
    rows = few.rows(whole.labels)
    assert len(samples) == len(outputs) == np.minimum(run.class_counts, 7).sum() < len(whole) / 2
    assert outputs.indices.tolist() == rows.tolist()
    assert outputs.labels.tolist() == whole.labels[rows].tolist()
    np.testing.assert_allclose(outputs.logits, whole.logits[rows], atol=1e-4)
    assert outputs.class_counts.tolist() == run.class_counts.tolist()
    assert (outputs.images_per_class, outputs.images_seed) == (7, 3)
    views = run.outputs("train", views=2, **chosen)
    assert views.indices.tolist() == 2 * rows.tolist()
    in_whole = np.concatenate([rows, len(whole) + rows])  # each image augmented as it is among all of them
    np.testing.assert_allclose(views.logits, run.outputs("train", views=2).logits[in_whole], atol=1e-4)
    assert np.abs(views.logits[: len(rows)] - views.logits[len(rows) :]).max() > 0.1
    samples.clear()
    assert run.outputs("train", **chosen) == outputs
    assert not samples  # kept, by number and seed
    paths = {
        outputs_path(run, "train", count, some)
        for count in (0, 1)
        for some in (None, ClassSubsample(7), few, ClassSubsample(8))
    }
    assert len(paths) == 8
    replace(whole, images_per_class=7, images_seed=4).save(outputs_path(run, "train", 0, few))
    assert run.outputs("train", **chosen) == outputs
    with pytest.raises(UserError, match="of the train split alone"):
        run.outputs("test", **chosen)


def test_a_run_is_a_model_and_a_loader(digits_copy):
    """What a run stores is what `extract` gives for its model and its loader, but for folded batch-norms."""
    run = Run.open(digits_copy)
    loader, stored = run.loader("test"), run.outputs("test")
    outputs = longtail.extract(run.model(), loader, class_counts=run.class_counts, split="test", device="cpu")
    assert outputs.model == stored.model
    for name in ("labels", "head_weight", "logits", "features"):
        np.testing.assert_allclose(getattr(outputs, name), getattr(stored, name), atol=1e-4)
