"""What cannot be calibrated is said in one line, and what can be is taken."""

import pytest
import torch
from torch import nn

import longtail
from longtail.errors import UserError
from longtail.outputs.extract import find_head

from .conftest import made

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3])


def net(forward=lambda self, x: self.fc(x)):
    torch.manual_seed(0)
    return made("Net", forward, fc=nn.Linear(6, 4))


def two(self, image, table):
    return self.fc(image + table)


def pair(self, both):
    return self.fc(both[0] + both[1])


def many(self, *parts):
    return self.fc(torch.stack(parts).sum(0))


@pytest.mark.parametrize("forward", [two, pair, many])
def test_several_inputs(forward):
    model = net(forward)
    batch = (X, X.flip(0)) if forward is not pair else ((X, X.flip(0)),)
    repaired, method = longtail.calibrate(model, [((X, X.flip(0)), Y)], device="cpu")
    torch.testing.assert_close(repaired(*batch), method.transform(model(*batch).detach()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["cat"] * 12, r"labels are str \('cat'\), not class numbers; number the classes from 0 on"),
        (torch.eye(4)[Y], r"if every sample has exactly one 1, argmax\(1\) gives the class numbers"),
        (torch.eye(4)[Y].index_fill(1, torch.tensor([0]), 1.0), "use posthoc.MultiLabelCalibration"),
        (torch.zeros(12, 5, 5).long(), "several numbers per sample"),
        (0.9 * torch.eye(4)[Y] + 0.025, "several numbers per sample"),
        (Y.float(), "convert them to whole numbers"),
        ([{"boxes": X}] * 12, "labels are dict"),
    ],
)
def test_labels_that_are_no_class_numbers(labels, message):
    with pytest.raises(UserError, match=message) as error:
        longtail.calibrate(net(), [(X, labels)], device="cpu")
    assert ("argmax" in str(error.value)) == ("exactly one 1" in message)  # never where it would make wrong labels


def test_too_many_inputs():
    with pytest.raises(UserError, match="a batch has 3 inputs, and Net takes 2: image, table"):
        longtail.calibrate(net(two), [((X, X, X), Y)], device="cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch.ao
def test_quantised_models_are_refused_and_attached():
    torch.manual_seed(0)
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
    with pytest.raises(
        UserError, match=r"its layers are quantised \(2.*\); calibrate before quantising. Add the method"
    ):
        longtail.calibrate(model, [(X, Y)], device="cpu")
    method = longtail.MARC().fit(longtail.extract(model, [(X, Y)], device="cpu"))
    torch.testing.assert_close(longtail.attach(model, method)(X), method.transform(model(X)), rtol=1e-4, atol=1e-4)


class Int8(nn.Linear):
    """Holds its weight in whole numbers, as 8-bit layers of others do."""

    def __init__(self):
        super().__init__(6, 4)
        self.weight = nn.Parameter((self.weight * 100).to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ self.weight.float().T / 100 + self.bias


def test_a_head_of_whole_numbers_is_named():
    model = nn.Sequential(nn.Linear(6, 6), Int8())
    with pytest.raises(UserError, match=r"1 has quantised weights \(Tensor of torch.int8\)"):
        longtail.calibrate(model, [(X, Y)], device="cpu")


@pytest.mark.parametrize(
    ("model", "kind"), [(None, "a NoneType"), ("resnet50", "a str"), (nn.Linear, "the class Linear"), (3, "a int")]
)
def test_what_is_no_model(model, kind):
    for call in (
        lambda: longtail.calibrate(model, [(X, Y)], device="cpu"),
        lambda: longtail.extract(model, [(X, Y)], device="cpu"),
        lambda: find_head(model, (X, Y)),
    ):
        with pytest.raises(UserError, match=f"a model must be a torch.nn.Module, not {kind}"):
            call()


def test_programs_that_were_exported_before():
    program = torch.export.export(net().eval(), (X,))
    with pytest.raises(UserError, match="not a ExportedProgram"):
        longtail.calibrate(program, [(X, Y)], device="cpu")
    with pytest.raises(UserError, match="cannot be put into evaluation mode .* the model before it is exported"):
        longtail.calibrate(program.module(), [(X, Y)], device="cpu")


def test_models_that_cannot_be_copied(tmp_path):
    model, said = net(), "Net cannot be copied with copy.deepcopy, and .* with longtail.attach$"
    with (tmp_path / "log").open("w") as model.log, pytest.raises(UserError, match=said):
        longtail.calibrate(model, [(X, Y)], device="cpu")


@pytest.mark.parametrize("loader", [(X, Y), [X, Y], (X.numpy(), Y.numpy())])
def test_one_batch_is_no_loader(loader):
    with pytest.raises(UserError, match=r"is one batch, not a loader; write \[\(inputs, labels\)\]"):
        longtail.calibrate(net(), loader, device="cpu")


@pytest.mark.parametrize(
    ("loader", "kind"),
    [(None, "NoneType"), ("images/", "str"), ({"train": [(X, Y)]}, "dict"), (X, "Tensor"), (3, "int")],
)
def test_what_gives_no_batches(loader, kind):
    for call in (longtail.calibrate, longtail.extract):
        with pytest.raises(UserError, match=f"a {kind} gives no batches; pass a DataLoader or a list of batches"):
            call(net(), loader, device="cpu")


@pytest.mark.parametrize(
    "model",
    [
        made("Normalised", lambda m, x: m.head((x - x.mean(0)) / x.std(0)), head=nn.Linear(4, 3)),
        nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)),
    ],
    ids=["formula", "batch-norm"],
)
def test_logits_that_depend_on_the_rest_of_the_batch_are_warned_of(model):
    x, y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)) + 2, torch.arange(24) % 3
    with pytest.warns(UserWarning, match="depend on the rest of the batch"):
        longtail.extract(model, [(x, y)], progress=False)
    longtail.extract(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3)), [(x, y)], progress=False)
