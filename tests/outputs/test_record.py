import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from longtail import MARC, Outputs
from longtail.errors import UserError
from longtail.posthoc import TauNorm


def example(size=50, **changes):
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=3).astype(np.float32)
    features = rng.normal(size=(size, 4)).astype(np.float32)
    values = {
        "labels": rng.integers(0, 3, size),
        "class_counts": np.array([30, 15, 5]),
        "logits": features @ weight.T + bias,
        "features": features,
        "head_weight": weight,
        "head_bias": bias,
        "indices": np.arange(size),
        "split": "validation",
        "model": "abc",
        "class_names": ("x", "y", "z"),
    }
    return Outputs(**{**values, **changes})


def test_what_is_written_is_read_and_is_plain_safetensors(tmp_path):
    outputs = example()
    outputs.save(str(tmp_path / "o.safetensors"))
    read = Outputs.open(str(tmp_path / "o.safetensors"), model="abc")
    for name in ("labels", "logits", "features", "class_counts", "head_weight", "head_bias", "indices"):
        np.testing.assert_array_equal(getattr(read, name), getattr(outputs, name))
    assert (read.split, read.views, read.class_names) == ("validation", 0, ("x", "y", "z"))
    np.testing.assert_array_equal(load_file(tmp_path / "o.safetensors")["logits"], outputs.logits)


def test_tensors_lists_and_other_types_are_taken(tmp_path):
    plain = example()
    given = {name: getattr(plain, name).tolist() for name in ("logits", "features", "class_counts", "head_bias")}
    outputs = example(**given, labels=plain.labels.astype(np.int32), head_weight=torch.from_numpy(plain.head_weight))
    outputs.save(tmp_path / "o.safetensors")
    np.testing.assert_allclose(MARC().fit(outputs).scale_, MARC().fit(plain).scale_, rtol=1e-5)
    assert Outputs.open(tmp_path / "o.safetensors").labels.dtype == np.int64


def test_a_class_vector_of_zeros_is_named():
    weight = example().head_weight.copy()
    weight[1] = 0
    with pytest.raises(UserError, match="a class vector must not be zero"):
        TauNorm(1.0).fit(example(head_weight=weight))


def test_outputs_of_another_model_are_refused(tmp_path):
    example().save(tmp_path / "o.safetensors")
    with pytest.raises(UserError, match="computed with another model"):
        Outputs.open(tmp_path / "o.safetensors", model="def")


def test_logits_come_from_features_where_they_are_not_stored(monkeypatch):
    from longtail.outputs import rows as logit_rows

    outputs = example()
    without = example(logits=None)
    monkeypatch.setattr(logit_rows, "COMPUTED_NUMBERS", 21)
    monkeypatch.setattr(logit_rows, "STEP_ROWS", 7)
    chunks = [chunk.numpy() for _, chunk in without.rows().chunks()]
    assert len(chunks) == 8
    np.testing.assert_allclose(np.concatenate(chunks), outputs.logits, atol=1e-6)


def test_norms_are_those_of_the_head_or_one():
    outputs = example()
    np.testing.assert_allclose(
        outputs.weight_norms, [np.sqrt((row**2).sum()) for row in outputs.head_weight], rtol=1e-6
    )
    assert example(head_weight=None).weight_norms.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": None, "features": None}, "need logits, or features and the head"),
        ({"features": np.zeros((3, 4))}, r"outputs have N = 50, but features is of shape \(3, 4\)"),
        ({"class_counts": np.ones(4, dtype=int)}, r"outputs have K = 3, but class_counts is of shape \(4,\)"),
        ({"head_weight": np.ones((1, 4))}, r"outputs have K = 3, but head_weight is of shape \(1, 4\)"),
        ({"head_bias": np.array([0, np.nan, 0])}, "head_bias of outputs must be finite real numbers"),
        ({"head_weight": np.full((3, 4), 1j)}, "head_weight of outputs must be finite real numbers"),
        ({"class_names": ("a", "b")}, "outputs have 3 classes, but 2 class names"),
        ({"logits": np.zeros(50)}, r"logits of outputs must be of shape \(N, K\), not \(50,\)"),
    ],
)
def test_outputs_that_do_not_fit_together(changes, message):
    with pytest.raises(UserError, match=message):
        example(**changes)


def test_files_that_hold_no_outputs_are_named(tmp_path):
    path = tmp_path / "o.safetensors"
    with pytest.raises(UserError, match="does not exist"):
        Outputs.open(path)
    save_file({"logits": np.zeros((2, 2), np.float32)}, path)
    with pytest.raises(UserError, match="holds no outputs of a model"):
        Outputs.open(path)


def test_a_failure_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "o.safetensors"
    example().save(path)
    before = path.read_bytes()
    broken = example(size=60)
    monkeypatch.setattr(np.memmap, "flush", lambda self: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(UserError, match="cannot write .*o.safetensors: disk full"):
        broken.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["o.safetensors"]
