"""Models and loaders of other people, the real ones: timm, torchvision, transformers, PEFT, compiled, wrapped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import longtail
from longtail import MARC
from longtail.errors import UserError
from longtail.heads.kinds import CosineHead
from longtail.outputs.extract import find_head

from .conftest import CLASSES, logits_of

SAMPLES = 120


@pytest.fixture(scope="module")
def pictures(digits):
    """Digits as (N, 3, 32, 32), every class among them."""
    images, labels = digits
    labels = torch.cat([torch.arange(CLASSES), labels[: SAMPLES - CLASSES]])
    return F.interpolate(images[:SAMPLES].repeat(1, 3, 1, 1), 32), labels


def importing(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


def timm_model(name, **settings):
    return importing("timm").create_model(name, num_classes=CLASSES, **settings)


def conv_head():
    """BiT's ResNet: pooled features go through a 1 x 1 convolution."""
    module = importing("timm.models.resnetv2")
    return module.ResNetV2(layers=[1] * 4, channels=[128] * 4, stem_chs=32, num_classes=CLASSES)


def vision_model(name, **settings):
    return importing("torchvision.models").get_model(name, num_classes=CLASSES, **settings)


SMALL_VIT = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2}
PICTURES = {
    "timm resnet": (lambda: timm_model("resnet10t"), ("fc",)),
    "timm DeiT, distilled": (lambda: timm_model("deit_tiny_distilled_patch16_224", **SMALL_VIT), ("head", "head_dist")),
    "timm LeViT, distilled": (
        lambda: timm_model("levit_128s", img_size=32, embed_dim=(16, 24, 32), key_dim=8, num_heads=(2, 2, 2)),
        ("head.linear", "head_dist.linear"),
    ),
    "timm ResNetV2, convolution": (conv_head, ("head.fc",)),
    "torchvision MobileNet": (lambda: vision_model("mobilenet_v2"), ("classifier.1",)),
    "transformers DeiT, distilled": (lambda: small_deit(), ("cls_classifier", "distillation_classifier")),
}


def small_deit():
    transformers = importing("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.DeiTConfig(**small, image_size=32, patch_size=16, num_labels=CLASSES)
    return transformers.DeiTForImageClassificationWithTeacher(config)


def awake(model):
    """Heads of these libraries start at zero or nearly so: no answer would tell them apart."""
    for name, parameter in model.named_parameters():
        if any(word in name for word in ("head", "fc.", "classifier", "score")):
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("family", PICTURES)
def test_models_of_pictures(family, pictures, calibrated):
    images, labels = pictures
    build, layers = PICTURES[family]
    model = awake(build())
    batches = [(images[i : i + 40], labels[i : i + 40]) for i in range(0, SAMPLES, 40)]
    repaired, _ = calibrated(model, batches, images, atol=1e-3)
    assert sorted(find_head(model, batches[0], device="cpu")) == sorted(layers)
    assert all(type(repaired.get_submodule(path)) in (nn.Linear, nn.Conv2d) for path in layers)


def test_a_network_that_ends_in_a_relu_is_refused_and_attached(pictures):
    """SqueezeNet: the class maps go through a ReLU before they are averaged, so no shift folds into them."""
    images, labels = pictures
    model = awake(vision_model("squeezenet1_1")).eval()
    with pytest.raises(
        UserError, match=r"a calibration cannot be folded into SqueezeNet: .* longtail.attach\(model, method\)"
    ):
        longtail.calibrate(model, [(images, labels)], device="cpu")
    method = MARC().fit(longtail.extract(model, [(images, labels)], device="cpu"))
    attached = longtail.attach(model, method)
    before = model(images).detach()
    torch.testing.assert_close(attached(images).detach(), method.transform(before), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def texts():
    """Token numbers (N, T) of different lengths, padded with 0, and labels 0..2, more of the first."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 24 + [1] * 9 + [2] * 3)
    tokens = torch.randint(1, 10, (36, 7), generator=generator) + 9 * labels.unsqueeze(1)
    mask = (torch.arange(7) < torch.randint(3, 8, (36, 1), generator=generator)).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}, labels


def in_batches(named, labels):
    return [{**{k: v[i : i + 12] for k, v in named.items()}, "labels": labels[i : i + 12]} for i in (0, 12, 24)]


def text_model(kind):
    transformers = importing("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        num_labels=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return awake(getattr(transformers, f"{kind}ForSequenceClassification")(config))


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2", "Roberta"])
def test_models_of_texts(kind, texts, calibrated):
    """A decoder scores every token and picks one; an encoder has a small network before its last layer."""
    named, labels = texts
    model = text_model(kind)
    repaired, _ = calibrated(model, in_batches(named, labels), named, atol=1e-3)
    (head,) = find_head(model, in_batches(named, labels)[0], device="cpu")
    assert head == ("classifier.out_proj" if kind == "Roberta" else "score")
    assert type(repaired.get_submodule(head)) is nn.Linear


@pytest.mark.parametrize("on_head", [False, True])
def test_adapters(on_head, texts, calibrated):
    """LoRA beside the layers of the network, and beside its head."""
    peft = importing("peft")
    named, labels = texts
    targets = ["query", "out_proj"] if on_head else ["query"]
    config = peft.LoraConfig(target_modules=targets, r=2, modules_to_save=None if on_head else ["classifier"])
    model = peft.get_peft_model(text_model("Roberta"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    repaired, _ = calibrated(model, in_batches(named, labels), named, atol=1e-3)
    if on_head:
        with torch.no_grad():
            expected = repaired.eval()(**named).logits
            merged = repaired.merge_and_unload()(**named).logits
        torch.testing.assert_close(merged, expected, rtol=1e-3, atol=1e-3)


# The networks are not trained, so their logits have nothing to do with the labels.
pytestmark = pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")


class HeadFirst(nn.Module):
    """The classifier has a name of its own, no bias, and stands before the layers it comes after."""

    def __init__(self):
        super().__init__()
        self.verdict = nn.Linear(16, CLASSES, bias=False)
        self.zz_body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())

    def forward(self, x):
        return self.verdict(self.zz_body(x))


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
