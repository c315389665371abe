from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import longtail
import longtail.extraction.run
from longtail import Outputs
from longtail.data.imbalance import Few
from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.errors import UserError
from longtail.extraction.run import Extractor
from longtail.metrics.scores import evaluate_logits
from longtail.networks.head import fingerprint
from longtail.outputs.writer import join_parts, part_path
from longtail.runs.folder import Run
from longtail.runs.score import score


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.body(x))


class TakesNames(Small):
    def forward(self, pixel_values, scale=1.0):
        return {"logits": super().forward(pixel_values) * scale}


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


def test_batches_of_named_inputs():
    model = TakesNames().eval()
    loader = [{"pixel_values": X, "labels": Y}]
    outputs = longtail.extract(model, loader, device="cpu")
    np.testing.assert_allclose(outputs.logits, model(X)["logits"].detach(), atol=1e-6)
    nested = longtail.extract(model, [({"pixel_values": X}, Y)], device="cpu")
    np.testing.assert_allclose(nested.logits, outputs.logits)


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


class Divides(Small):
    def forward(self, x):
        return super().forward(x) / 0.07


@pytest.mark.parametrize("head", [None, "fc"])
def test_a_factor_behind_the_head_belongs_to_it(head):
    model = Divides().eval()
    outputs = longtail.extract(model, [(X, Y)], head=head, device="cpu")
    np.testing.assert_allclose(outputs.logits, model(X).detach(), atol=1e-6)
    np.testing.assert_allclose(outputs.head_weight, model.fc.weight.detach() / 0.07, rtol=1e-4)
    np.testing.assert_allclose(outputs.head_bias, model.fc.bias.detach() / 0.07, rtol=1e-4)


def test_outputs_stream_to_a_file_and_are_mapped(tmp_path):
    model = Small().eval()
    loader = [(X[:12], Y[:12]), (X[12:], Y[12:])]
    path = tmp_path / "new" / "outputs.safetensors"
    mapped = longtail.extract(model, loader, path, device="cpu")
    kept = longtail.extract(model, loader, device="cpu")
    assert isinstance(mapped.logits[:], np.memmap)
    assert isinstance(mapped.features[:], np.memmap)
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


class WithFeatures(Small):
    """Answers with its embedding, which is a linear layer's too, and its logits."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)

    def forward(self, x):
        features = self.body(x)
        return features, self.fc(features)


class WithRotation(WithFeatures):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        features = self.body(x)
        return {"pred": self.fc(features), "rotation": self.head(features)}


def test_of_several_answers_the_caller_says_which():
    outputs = longtail.extract(WithFeatures(), [(X, Y)], head="fc", device="cpu")
    assert outputs.logits.shape == (20, 3)


class Together(Small):
    def forward(self, x):
        return self.fc(self.body(x).reshape(2, -1, 6)).mean(1)


class OneNumber(Small):
    def forward(self, x):
        return super().forward(x)[:, :1]


class Sigmoids(Small):
    def forward(self, x):
        return super().forward(x).sigmoid()


class Nothing(Small):
    forward = nn.Module.forward


@pytest.mark.parametrize(
    ("model", "loader", "message"),
    [
        (Small(), [], "no batches"),
        (Small(), [X], "must be \\(inputs, labels\\)"),
        (Small(), [{"x": X}], "has no labels: its entries are x"),
        (Small(), [(X, Y + 1)], r"gives labels 1\.\.3, the model has classes 0\.\.2"),
        (WithFeatures(), [(X, Y)], r"several layers \(body, fc\); name the classifier with head="),
        (WithRotation(), [(X, Y)], r"several layers \(fc, head\)"),
        (Small(), [(X * torch.nan, Y)], "returns NaN or inf on the first batch"),
        (Together(), [(X, Y)], r"returns \(2, 3\) for 20 samples; it must return one row"),
        (OneNumber(), [(X, Y)], r"returns \(20, 1\) for 20 samples; it must return .* at least two classes"),
        (Sigmoids(), [(X, Y)], "Sigmoids returns sigmoids of the output of fc, one class at a time; return the logits"),
        (Nothing(), [(X, Y)], r"Nothing has no forward that gives logits; .* \(its parts: body, fc\)"),
        (Small(), [(X[:, :3], Y)], "Small fails on the first batch: RuntimeError: mat1 and mat2"),
        (Small().to("meta"), [(X, Y)], r"parameters without numbers \(device meta\); load its weights"),
    ],
)
def test_what_does_not_fit_is_named(model, loader, message):
    with pytest.raises(UserError, match=message):
        longtail.extract(model, loader, device="cpu")


def read(path):
    return Outputs.open(path)


def test_outputs_of_a_run_are_what_the_model_says(digits_copy):
    run = Run.open(digits_copy)
    path = Extractor(run).write("test", Extractor(run).path("test"))
    outputs = read(path)
    splits = run.splits()
    scored = score(run.load_model(), splits.test, run.transforms(splits)[1], SINGLE_PROCESS, run.class_counts)
    assert evaluate_logits(outputs.logits, outputs.labels, run.class_counts) == scored
    np.testing.assert_array_equal(outputs.labels, splits.test.labels)
    assert outputs.indices.tolist() == list(range(600))
    assert outputs.class_names == tuple("0123456789")
    assert outputs.class_counts.tolist() == run.class_counts.tolist()
    assert sorted(file.name for file in path.parent.iterdir()) == ["test.safetensors"]


def test_views_are_augmented_anew_and_belong_to_training(digits_copy):
    run = Run.open(digits_copy)
    outputs = Extractor(run).outputs("train", views=2)
    size = run.split_sizes["train"]
    assert len(outputs) == 2 * size
    assert outputs.views == 2
    assert outputs.indices.tolist() == 2 * list(range(size))
    assert (outputs.logits[:size] != outputs.logits[size:]).any(1).mean() > 0.8
    one = Extractor(run).outputs("train", views=1)
    np.testing.assert_array_equal(one.logits, outputs.logits[:size])
    with pytest.raises(UserError, match="views must be a whole number of at least 0, not -1"):
        Extractor(run).outputs("train", views=-1)
    with pytest.raises(UserError, match="views are for the train split"):
        Extractor(run).outputs("test", views=1)


def test_half_precision_and_features_alone(digits_copy):
    run = Run.open(digits_copy)
    full = Extractor(run).outputs("test")
    half = read(Extractor(run).write("test", digits_copy / "half.safetensors", dtype="float16"))
    assert half.logits.dtype == half.features.dtype == np.float16
    np.testing.assert_allclose(half.logits, full.logits, rtol=2e-3, atol=1e-2)
    alone = read(Extractor(run).write("test", digits_copy / "features.safetensors", keep_logits=False))
    assert alone.logits is None
    np.testing.assert_allclose(alone.rows().read(slice(None)), full.logits, atol=1e-4)


def test_parts_of_several_processes_make_the_file_of_one(digits_copy, monkeypatch):
    run = Run.open(digits_copy)
    whole = Extractor(run).write("train", digits_copy / "one.safetensors", views=2)
    monkeypatch.setattr("longtail.extraction.run.BATCH", 32)
    whole = Extractor(run).write("train", digits_copy / "one.safetensors", views=2)
    path = digits_copy / "three.safetensors"
    monkeypatch.setattr("longtail.extraction.run.join_parts", lambda *words: 0)
    monkeypatch.setattr(World, "gather", lambda self, value: [value])
    monkeypatch.setattr(World, "barrier", lambda self: None)
    for rank in range(3):
        Extractor(run, World(rank, 3, torch.device("cpu"))).write("train", path, views=2)
    size = run.split_sizes["train"]
    assert join_parts(path, World(0, 3, torch.device("cpu")), 2 * size, np.arange(size)) == 0
    assert path.read_bytes() == whole.read_bytes()


def test_rows_missing_or_written_twice_are_named(digits_copy, monkeypatch):
    run = Run.open(digits_copy)
    monkeypatch.setattr("longtail.extraction.run.join_parts", lambda *words: 0)
    monkeypatch.setattr(World, "gather", lambda self, value: [value])
    monkeypatch.setattr(World, "barrier", lambda self: None)
    path = digits_copy / "two.safetensors"
    world = World(0, 2, torch.device("cpu"))
    Extractor(run, world).write("test", path)
    with pytest.raises(UserError, match=r"rows of a process are missing: .*two.part1"):
        join_parts(path, world, 600, np.arange(600))
    part_path(path, 1).write_bytes(part_path(path, 0).read_bytes())
    with pytest.raises(UserError, match="sample 0 was written twice"):
        join_parts(path, world, 600, np.arange(600))
    assert not path.exists()


def test_an_interrupted_extraction_leaves_nothing(digits_copy, monkeypatch):
    run = Run.open(digits_copy)

    def broken(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr("longtail.extraction.run.run_batch", broken)
    with pytest.raises(KeyboardInterrupt):
        Extractor(run).outputs("test")
    assert list((digits_copy / "outputs").iterdir()) == []


def test_outputs_on_the_images_of_another_run_are_not_mistaken_for_each_other(digits_copy):
    run = Run.open(digits_copy)
    assert Extractor(run, data_run=run).path("test") == Extractor(run).path("test")
    others = []
    for imbalance in (3.0, 10.0):
        record = replace(run.record, config={**run.record.config, "imbalance": imbalance})
        others.append(Run(digits_copy.parent / f"c{imbalance}" / "softmax-seed0", record))  # of one name
    paths = {Extractor(run, data_run=other).path("test") for other in (run, *others)}
    assert len(paths) == 3
    assert {path.parent for path in paths} == {digits_copy / "outputs"}


def test_a_few_images_per_class_are_read_and_no_others(digits_copy, monkeypatch):
    run, few = Run.open(digits_copy), Few(7, seed=3)
    whole = Extractor(run).outputs("train")
    shown = []
    run_batch = longtail.extraction.run.run_batch

    def counting(model, inputs, *words):
        shown.append(len(inputs))
        return run_batch(model, inputs, *words)

    monkeypatch.setattr("longtail.extraction.run.run_batch", counting)
    outputs = Extractor(run).outputs("train", few=few)
    rows = few.rows(whole.labels)
    assert sum(shown) == len(outputs) == np.minimum(run.class_counts, 7).sum() < len(whole) / 2
    assert outputs.indices.tolist() == rows.tolist()
    assert outputs.labels.tolist() == whole.labels[rows].tolist()
    np.testing.assert_allclose(outputs.logits, whole.logits[rows], atol=1e-4)
    assert outputs.class_counts.tolist() == run.class_counts.tolist()
    assert (outputs.images_per_class, outputs.images_seed) == (7, 3)
    views = Extractor(run).outputs("train", views=2, few=few)
    assert views.indices.tolist() == 2 * rows.tolist()
    in_whole = np.concatenate([rows, len(whole) + rows])  # each image augmented as it is among all of them
    np.testing.assert_allclose(views.logits, Extractor(run).outputs("train", views=2).logits[in_whole], atol=1e-4)
    assert np.abs(views.logits[: len(rows)] - views.logits[len(rows) :]).max() > 0.1
    shown.clear()
    assert Extractor(run).outputs("train", few=few) == outputs
    assert not shown  # kept, by number and seed
    paths = {Extractor(run).path("train", count, some) for count in (0, 1) for some in (None, Few(7), few, Few(8))}
    assert len(paths) == 8
    replace(whole, images_per_class=7, images_seed=4).save(Extractor(run).path("train", 0, few))
    assert Extractor(run).outputs("train", few=few) == outputs
    with pytest.raises(UserError, match="of the train split alone"):
        Extractor(run).outputs("test", few=few)
