"""Models of timm, torchvision, transformers and PEFT, the real ones with random weights, by family."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longtail
from longtail import MARC
from longtail.errors import UserError
from longtail.outputs.extract import find_head

CLASSES = 10
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
    "timm DeiT, distilled": (
        lambda: timm_model("deit_tiny_distilled_patch16_224", **SMALL_VIT),
        ("head", "head_dist"),
    ),
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
    found = find_head(model, batch=batches[0], device="cpu")
    assert sorted(found.layers) == sorted(layers)
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
    (head,) = find_head(model, batch=in_batches(named, labels)[0], device="cpu").layers
    assert head == ("classifier.out_proj" if kind == "Roberta" else "score")
    assert type(repaired.get_submodule(head)) is nn.Linear
    assert find_head(model) == head
    assert not find_head(model).sure


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
    guess = find_head(model)
    assert "lora_" not in guess
    assert "dense" not in guess
    repaired, _ = calibrated(model, in_batches(named, labels), named, atol=1e-3)
    found = find_head(model, batch=in_batches(named, labels)[0], device="cpu")
    assert guess in found.layers
    if on_head:
        with torch.no_grad():
            expected = repaired.eval()(**named).logits
            merged = repaired.merge_and_unload()(**named).logits
        torch.testing.assert_close(merged, expected, rtol=1e-3, atol=1e-3)
