import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from longtail import HALO
from longtail.errors import UserError
from longtail.outputs.readers import read_held_out, read_outputs
from longtail.outputs.record import Outputs

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(30, 3)).astype(np.float32)
LABELS = np.arange(30) % 3


def write(folder, kind):
    path = folder / f"logits.{kind}"
    if kind == "npz":
        np.savez(path, logits=LOGITS, labels=LABELS)
    elif kind == "safetensors":
        save_file({"logits": LOGITS, "labels": LABELS}, path)
    elif kind == "csv":
        rows = [f"{label},{','.join(str(value) for value in row)}" for label, row in zip(LABELS, LOGITS, strict=True)]
        path.write_text("label,a,b,c\n" + "\n".join(rows) + "\n")
    else:
        np.save(path, LOGITS)
        np.save(folder / "y.npy", LABELS)
    return path


@pytest.mark.parametrize("kind", ["npz", "npy", "csv", "safetensors"])
def test_every_kind_of_file_holds_the_same(tmp_path, kind):
    path = write(tmp_path, kind)
    outputs = read_outputs(path, tmp_path / "y.npy" if kind == "npy" else None, split="test")
    np.testing.assert_allclose(outputs.logits, LOGITS, rtol=1e-6)
    assert outputs.labels.tolist() == LABELS.tolist()
    assert outputs.class_counts.tolist() == [10, 10, 10]
    assert outputs.split == "test"


def test_what_else_is_known_is_used(tmp_path):
    weight, counts = RNG.normal(size=(3, 5)), np.array([500, 50, 5])
    known = {"head_weight": weight, "class_counts": counts, "class_names": ["cat", "dog", "eel"]}
    np.savez(tmp_path / "a.npz", logits=LOGITS, y=LABELS, **known)
    outputs = read_outputs(tmp_path / "a.npz", need_counts=True)
    assert outputs.class_names == ("cat", "dog", "eel")
    np.testing.assert_allclose(outputs.weight_norms, np.linalg.norm(weight, axis=1))
    assert outputs.class_counts.tolist() == [500, 50, 5]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "cannot read .txt; use .npz"),
        ("a.npz", b"PK broken", "not a whole .npz file"),
        ("a.npy", b"broken", "not a whole .npy file"),
        ("a.csv", b"a,b\n1,2\n", "has no labels .a column or array called label"),
        ("a.csv", b"label,a,b\n1,2\n", "line 2: 2 cells where the header has 3"),
        ("a.csv", b"label,a,b\n1,2,x\n", "line 2: could not convert"),
        ("a.csv", b"label,a,b\n", "holds no samples"),
        ("a.csv", b"\xff\xfe", "not a CSV file of logits in UTF-8"),
        ("a.csv", b"label,a,b\n0,1,nan\n", "a.csv: logits of row 0 contain NaN"),
        ("a.csv", b",label,a,b\n0,1,2,3\n", "a column without a name"),
        ("a.safetensors", b"broken", "not a whole safetensors file"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_outputs(tmp_path / name)


def test_missing_names_are_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_outputs(tmp_path / "none.npz")
    np.savez(tmp_path / "a.npz", scores=LOGITS, labels=LABELS)
    with pytest.raises(UserError, match="no array called logits; it has: scores, labels"):
        read_outputs(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", logits=LOGITS)
    with pytest.raises(UserError, match="no labels .* give them with --labels"):
        read_outputs(tmp_path / "a.npz")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_that_torch_writes_are_read(tmp_path, dtype):
    logits = torch.from_numpy(LOGITS).to(dtype)
    save_tensors({"logits": logits, "labels": torch.from_numpy(LABELS).int()}, tmp_path / "a.safetensors")
    outputs = read_outputs(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(outputs.logits, logits.double().numpy())
    assert outputs.labels.tolist() == LABELS.tolist()


def test_a_type_that_cannot_be_read_is_named(tmp_path):
    save_tensors({"logits": torch.from_numpy(LOGITS).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="logits is of type F8_E4M3; save it as one of F64, F32"):
        read_outputs(tmp_path / "a.safetensors")


def test_held_out_files_serve_as_what_they_are_given_for(tmp_path):
    train = Outputs(LABELS, np.array([500, 60, 8]), logits=LOGITS)
    train.save(tmp_path / "held-out.safetensors")  # says of itself that it is of the training split
    outputs = read_held_out(tmp_path / "held-out.safetensors", "test", train)
    assert outputs.split == "test"
    assert read_held_out(write(tmp_path, "npz"), "test", train).class_counts.tolist() == [500, 60, 8]
    np.savez(tmp_path / "two.npz", logits=LOGITS[:, :2], labels=LABELS % 2)
    with pytest.raises(UserError, match=r"two\.npz: 2 classes, where the training samples have 3"):
        read_held_out(tmp_path / "two.npz", "test", train)
    with pytest.raises(UserError, match="has labels of its own"):
        read_outputs(tmp_path / "held-out.safetensors", tmp_path / "y.npy")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("dog", "cat", "eel"),
            "the same classes in another order than the training samples: column 0 is dog, and cat",
        ),
        (("cat", "dog", "hen"), "other classes than the training samples: column 2 is hen, and eel in training"),
        (("cat", "dog", "eel"), None),
        (("0", "1", "2"), None),  # numbers of columns are no names
    ],
)
def test_held_out_classes_are_those_of_training_in_the_same_order(tmp_path, names, message):
    train = Outputs(LABELS, np.array([500, 60, 8]), logits=LOGITS, class_names=("cat", "dog", "eel"))
    rows = [",".join(map(str, [*logits, label])) for logits, label in zip(LOGITS.tolist(), LABELS, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join([",".join([*names, "y"]), *rows]))
    if message is None:
        assert read_held_out(tmp_path / "a.csv", "test", train).class_names == ("cat", "dog", "eel")
        return
    with pytest.raises(UserError, match=rf"a\.csv: {message}"):
        read_held_out(tmp_path / "a.csv", "test", train)
    np.savez(tmp_path / "a.npz", logits=LOGITS, labels=LABELS, class_names=names)
    validation = read_outputs(tmp_path / "a.npz", split="validation")
    with pytest.raises(UserError, match=message):
        HALO().fit(train, validation=validation)


def test_columns_that_are_numbered_in_another_order_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("2,1,0,label\n0.1,0.2,0.3,0\n")
    with pytest.raises(UserError, match="the columns of the logits are not in the order of the classes: 2, 1, 0"):
        read_outputs(tmp_path / "a.csv")


def test_counts_that_are_no_counts_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", logits=LOGITS, labels=LABELS, class_counts=[0.5, 0.3, 0.2])
    with pytest.raises(UserError, match="class_counts must be whole numbers of training samples"):
        read_outputs(tmp_path / "a.npz")
    with pytest.raises(UserError, match="labels must be whole numbers of classes"):
        Outputs(LABELS + 0.7, np.array([10, 10, 10]), logits=LOGITS)


@pytest.mark.parametrize("shape", [(30,), (30, 1)])
def test_one_logit_per_sample_is_two_logits(tmp_path, shape):
    path, logit, y = tmp_path / "one.npz", LOGITS[:, 0], LABELS % 2
    np.savez(path, logits=logit.reshape(shape), labels=y, head_weight=np.ones((1, 2)), head_bias=np.ones(1))
    outputs = read_outputs(path)
    np.testing.assert_array_equal(outputs.logits, np.stack([-logit / 2, logit / 2], 1))
    assert outputs.class_counts.tolist() == np.bincount(y).tolist()
    assert (outputs.head_weight.tolist(), outputs.head_bias.tolist()) == ([[-0.5, -0.5], [0.5, 0.5]], [-0.5, 0.5])
    np.savez(path, logits=1 / (1 + np.exp(-logit)), labels=y)
    with pytest.raises(UserError, match=r"one.npz: these are probabilities of class 1, not logits; pass log\(p"):
        read_outputs(path)
