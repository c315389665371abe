"""Models and loaders of other people, the real ones: Hugging Face, timm, torchvision, compiled, wrapped."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import longtail
from longtail.errors import UserError
from longtail.heads.kinds import CosineHead

# The networks are not trained, so their logits have nothing to do with the labels.
pytestmark = pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
CLASSES = 10


def logits_of(model, inputs):
    with torch.inference_mode():
        answer = model.eval()(**inputs) if isinstance(inputs, dict) else model.eval()(inputs)
    return answer if isinstance(answer, torch.Tensor) else answer["logits"]


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    shape = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": CLASSES}
    return ViTForImageClassification(ViTConfig(**small, **shape))


def sequential():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def test_a_transformer_of_images(digits, calibrated):
    images, labels = digits
    batches = [{"pixel_values": images[i : i + 64], "labels": labels[i : i + 64]} for i in range(0, len(labels), 64)]
    repaired, _ = calibrated(vit(), batches, {"pixel_values": images})
    assert type(repaired).__name__ == "ViTForImageClassification"
    assert type(repaired.classifier) is nn.Linear


class HeadFirst(nn.Module):
    """The classifier has a name of its own, no bias, and stands before the layers it comes after."""

    def __init__(self):
        super().__init__()
        self.verdict = nn.Linear(16, CLASSES, bias=False)
        self.zz_body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())

    def forward(self, x):
        return self.verdict(self.zz_body(x))


class Misleading(HeadFirst):
    """The usual name belongs to another layer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        return self.verdict(self.head(self.zz_body(x)))


class Shares(HeadFirst):
    """Ends in a softmax's logarithm, as many examples do."""

    def forward(self, x):
        return super().forward(x).log_softmax(1)


@pytest.mark.parametrize(
    ("build", "head"),
    [(sequential, "3"), (HeadFirst, "verdict"), (Misleading, "verdict")],
    ids=["sequential", "head first", "misleading"],
)
def test_the_layer_that_answers_is_found(build, head, digits, calibrated):
    images, labels = digits
    repaired, _ = calibrated(build(), [(images, labels)], images)
    layer = repaired.get_submodule(head)
    assert type(layer) is nn.Linear
    assert layer.bias is not None


def test_a_softmax_at_the_end_stays_at_the_end(digits):
    images, labels = digits
    model = Shares()
    repaired, fitted = longtail.calibrate(model, [(images, labels)], device="cpu")
    logits = model.verdict(model.zz_body(images)).detach()
    torch.testing.assert_close(
        logits_of(repaired, images), fitted.transform(logits).log_softmax(1), rtol=1e-3, atol=1e-3
    )


class Cosine(nn.Linear):
    """What many call a cosine classifier: a subclass of `nn.Linear` that is not linear."""

    def forward(self, x):
        return 16 * F.linear(F.normalize(x), F.normalize(self.weight))


class CosineByHand(nn.Module):
    """Class vectors that are no layer at all."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        self.vectors = nn.Parameter(torch.randn(CLASSES, 16))

    def forward(self, x):
        return 16 * F.linear(F.normalize(self.body(x)), F.normalize(self.vectors))


def test_cosine_heads_are_refused_or_folded(digits, calibrated):
    images, labels = digits
    body = [nn.Flatten(), nn.Linear(64, 16)]
    with pytest.raises(
        UserError, match=r"2 \(Cosine\) does not compute weight times input plus bias .* longtail.attach"
    ):
        longtail.calibrate(nn.Sequential(*body, Cosine(16, CLASSES)), [(images, labels)], device="cpu")
    with pytest.raises(
        UserError, match=r"no linear layer .* of CosineByHand outputs its logits, of shape .* longtail.attach"
    ):
        longtail.calibrate(CosineByHand(), [(images, labels)], device="cpu")
    repaired, _ = calibrated(nn.Sequential(*body, CosineHead(16, CLASSES)), [(images, labels)], images)
    assert type(repaired[2].linear) is nn.Linear


@pytest.mark.parametrize("wrap", ["torch.compile", "compile in place", "compiled body", "DataParallel"])
def test_compiled_and_wrapped_models(wrap, digits):
    """Compiled ones were run before: hooks are heard all the same."""
    images, labels = digits
    model = HeadFirst().eval()
    expected = model(images).detach()
    if wrap == "compile in place":
        model.compile(backend="eager")
        wrapped = model
    elif wrap == "compiled body":
        model.zz_body = torch.compile(model.zz_body, backend="eager")
        wrapped = model
    else:
        wrapped = nn.DataParallel(model) if wrap == "DataParallel" else torch.compile(model, backend="eager")
    with torch.inference_mode():
        wrapped(images)
    repaired, fitted = longtail.calibrate(wrapped, [(images, labels)], device="cpu")
    assert isinstance(repaired, HeadFirst)
    torch.testing.assert_close(logits_of(repaired, images), fitted.transform(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")  # of torch
def test_a_distributed_model(digits, tmp_path):
    images, labels = digits
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = HeadFirst()
        repaired, fitted = longtail.calibrate(DistributedDataParallel(model), [(images, labels)], device="cpu")
    finally:
        dist.destroy_process_group()
    expected = fitted.transform(logits_of(model, images))
    torch.testing.assert_close(logits_of(repaired, images), expected, rtol=1e-3, atol=1e-3)


def hugging_face(images, labels, names=("pixel_values", "labels")):
    from datasets import Dataset

    return Dataset.from_dict({names[0]: images.numpy(), names[1]: labels.numpy(), "file": [f"{n}.png" for n in labels]})


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: TensorDataset(x, y),
        lambda x, y: [(x.numpy(), y.numpy().reshape(-1, 1))],
        lambda x, y: [{"pixel_values": x, "labels": y}],
        lambda x, y: [{"image": x, "label": y}],
        lambda x, y: hugging_face(x, y),
        lambda x, y: hugging_face(x, y, ("image", "label")).with_format("torch"),
        lambda x, y: hugging_face(x, y).to_iterable_dataset(),
        lambda x, y: DataLoader(hugging_face(x, y).with_format("torch"), 50),
    ],
    ids=["Dataset", "arrays", "named", "other names", "hf", "hf torch", "hf stream", "hf loader"],
)
def test_any_loader(make, digits):
    images, labels = digits
    model = HeadFirst()
    outputs = longtail.extract(model, make(images, labels), device="cpu")
    assert outputs.labels.tolist() == labels.tolist()
    np.testing.assert_allclose(outputs.logits, logits_of(model, images), atol=1e-5)
