"""Which parameters of a network are trained: all, those of the last blocks, low-rank adapters, or the head alone.

LoRA trains the product of two thin matrices beside each linear layer of the blocks, W + (alpha / r) B A; after
training it is added to W, and the network is as large as before.
Paper: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from longtail.backbones import evaluating
from longtail.backbones.library import CHANNELS, library_of
from longtail.config import TrainConfig
from longtail.data.images import Images
from longtail.data.splits import image_side
from longtail.errors import UserError
from longtail.files.atomic import cache_folder, replacing_folder, write_json
from longtail.files.reading import reason
from longtail.heads.fold import head_of
from longtail.methods import build_posthoc
from longtail.outputs.record import Outputs, fingerprint
from longtail.runs.folder import Run, write_model
from longtail.runs.record import MODEL_FILE, PROBE_FILE, RUN_FILE, RUN_FILES, RUN_FOLDERS

if TYPE_CHECKING:
    from longtail.posthoc.probe.method import ProbeHead

RANK, ALPHA = 8, 16  # of LoRA
# Settings of training that a head fitted on features has no use for, and their defaults.
OF_STEPS = {"method": "softmax", "sampler": None, "mix": "none", "label_smoothing": 0.0, "defer": None, "ema": None}


def select(model: nn.Module, config: TrainConfig, images: Images) -> None:
    """Freeze the parameters of a network that are not trained on these images, and add adapters for LoRA."""
    if config.train == "all":
        return
    backbone = model.get_submodule("backbone")
    if config.train == "lora":
        _add_adapters(model, config)
    elif config.train == "head":
        for name, default in OF_STEPS.items():
            if getattr(config, name) != default:
                option = f"--{name.replace('_', '-')} {getattr(config, name)}"
                raise UserError(f"--train head fits Probe on features, without steps of training; leave out {option}")
        _require_target_prior(head_method(config), images)
        backbone.requires_grad_(False)
    else:
        wanted, (count, layers) = int(config.train.partition(":")[2]), layer_numbers(backbone)
        if wanted > count:
            raise UserError(f"--train {config.train}: {config.backbone} has {count} blocks; --train all trains all")
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad_(layers[name] > count - wanted)


def frozen_modules(model: nn.Module) -> list[nn.Module]:
    """The largest modules whose parameters are all frozen; batch-norm and dropout stay in evaluation mode there."""
    trained = [parameter.requires_grad for parameter in model.parameters()]
    if not trained or all(trained):
        return []
    if not any(trained):
        return [model]
    return [frozen for child in model.children() for frozen in frozen_modules(child)]


def layer_numbers(backbone: nn.Module) -> tuple[int, dict[str, int]]:
    """The number n of blocks, and the layer of each parameter: 0 before the blocks, 1 to n in one, n + 1 after them.

    Blocks are the stages layer1, layer2, … of a ResNet, or the children of the container that holds most of the
    parameters, such as `blocks` or `stages`. What is registered after them follows them.
    """
    blocks = _blocks(backbone)
    numbers, latest = {}, 0
    for path, _ in backbone.named_parameters():
        inside = next((number for number, block in enumerate(blocks, 1) if path.startswith(f"{block}.")), None)
        latest = max(latest, inside or (len(blocks) + 1 if latest else 0))
        numbers[path] = inside or latest
    return len(blocks), numbers


def _blocks(backbone: nn.Module) -> list[str]:
    """Paths of the blocks of a network in their order; empty if it has none."""
    modules = dict(backbone.named_modules())
    stages = [path for path in modules if re.fullmatch(r"(network\.)?layer\d", path)]
    if stages:
        return stages
    largest: tuple[int, list[str]] = (0, [])
    for path, module in modules.items():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            children = [f"{path}.{child}" for child, block in module.named_children() if any(block.children())]
            size = sum(parameter.numel() for parameter in module.parameters())
            if len(children) > 1 and size > largest[0]:
                largest = size, children
    return largest[1]


def _add_adapters(model: nn.Module, config: TrainConfig) -> None:
    backbone = model.get_submodule("backbone")
    try:
        import peft
    except (ImportError, RuntimeError) as error:
        raise UserError(f"--train lora needs peft ({reason(error)}): pip install 'longtail[lora]'") from error
    blocks = tuple(f"{path}." for path in _blocks(backbone))
    inside = {path: module for path, module in backbone.named_modules() if path.startswith(blocks)}
    linear = {path: module for path, module in inside.items() if isinstance(module, nn.Linear)}
    if not linear:
        raise UserError(f"--train lora: {config.backbone} has no linear layers in its blocks; use last:N, all or head")
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=_called(linear, backbone, config))
    peft.inject_adapter_in_model(settings, backbone)


def _called(layers: Mapping[str, nn.Module], backbone: nn.Module, config: TrainConfig) -> list[str]:
    """Paths of the layers that are called: some networks read the weight of a layer instead, and miss an adapter."""
    called: set[str] = set()
    hooks = [layer.register_forward_hook(lambda *_, path=path: called.add(path)) for path, layer in layers.items()]
    side = image_side(config)
    with evaluating(backbone):
        backbone(torch.zeros(1, CHANNELS, side, side))
    for hook in hooks:
        hook.remove()
    return [path for path in layers if path in called]


def merged(model: nn.Module) -> nn.Module:
    """The network with its adapters added to the weights; itself if it has none."""
    if not any(True for _ in _adapters(model)):
        return model
    model = copy.deepcopy(model)
    for path, layer in list(_adapters(model)):
        layer.merge(safe_merge=True)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.get_base_layer())
    return model


def _adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, module) for path, module in model.named_modules() if hasattr(module, "get_base_layer"))


def described(model: nn.Module, config: TrainConfig) -> str:
    """What is trained of a network, and how, in one line."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained, total = sum(size for size, some in sizes if some), sum(size for size, _ in sizes)
    text = f"--train {config.train}: {trained:,} of {total:,} parameters of {config.backbone}"
    if library_of(config.backbone) or config.weights:
        text += f", from {config.weights or ('published' if config.pretrained else 'random') + ' weights'}"
    if config.mean is not None:
        text += f", images of {config.image_size} x {config.image_size} ({config.interpolation})"
    if config.train == "head":
        return f"{text}; Probe fits them on the features"
    decay = f" --layer-decay {config.layer_decay:g}" if config.layer_decay < 1 else ""
    rates = f"--lr {config.lr:g} --weight-decay {config.weight_decay:g}{decay}"
    return f"{text}; --optimizer {config.optimizer} {rates} --precision {config.precision}"


def head_method(config: TrainConfig) -> ProbeHead:
    """The method that fits the head of a frozen network: `Probe` with the options of the configuration."""
    from longtail.posthoc.probe.method import ProbeHead  # scikit-learn takes long to import

    method = build_posthoc("probe", config.options)
    assert isinstance(method, ProbeHead)
    method.check_settings()
    return method


def _require_target_prior(method: ProbeHead, images: Images) -> None:
    """Refuse a target prior that does not fit the classes, before anything is computed."""
    from longtail.posthoc.probe.inputs import log_target_prior

    counts = images.class_counts.numpy()
    with np.errstate(divide="ignore"):
        log_target_prior(method.target_prior, np.log(counts / counts.sum()), images.class_names)


def fit_head(model: nn.Module, run: Run) -> float:
    """Fit the head of a frozen network on the training images of a run; returns the loss on them.

    Each image is run once, without augmentation. What was chosen is written to `probe.json`.
    """
    from longtail.posthoc.inputs import fit_outputs

    method = head_method(run.config)
    train = frozen_run(model, run).outputs("train")
    fit_outputs(method, train, None, run.world)
    head = head_of(model)
    head.load_state_dict(method.head(head).state_dict())
    if run.world.is_main:
        source = {"source": f"{run.data_name}, train", "samples": len(train), "features": head.in_features}
        names = {"classes": run.class_names}
        write_json(run.folder / PROBE_FILE, {**method.probe.to_dict(), **names, "train": source})
    losses = [
        F.cross_entropy(chunk, torch.from_numpy(train.labels[rows]), reduction="sum")
        for rows, chunk in with_head_of(train, model).rows().chunks()
    ]
    return float(sum(losses)) / len(train)


def frozen_run(model: nn.Module, run: Run) -> Run:
    """A run in the cache folder with the backbone of a network and a head of ones; its outputs hold the features.

    Every run with the same backbone and images has the same one, so the features are computed once.
    """
    network = copy.deepcopy(model)
    for values in head_of(network).parameters():
        nn.init.ones_(values)
    record = replace(run.record, config={**run.record.config, "options": {}}, model=None)
    images = {name: split.digest for name, split in record.data.splits.items()}
    config = run.config
    identity = json.dumps([record.digest, fingerprint(network), images, config.root, config.train_list])
    folder = cache_folder() / "frozen" / hashlib.sha256(identity.encode()).hexdigest()[:24]
    if run.world.is_main and not (folder / MODEL_FILE).is_file():
        with replacing_folder(folder, (*RUN_FILES, *RUN_FOLDERS), "a run") as new:
            written = write_model(new / MODEL_FILE, network, record, {})
            write_json(new / RUN_FILE, replace(record, model=written).to_dict())
    run.world.barrier()
    return Run.open(folder).using(run.world, workers=run.workers, display=run.display)


def with_head_of(outputs: Outputs, model: nn.Module, identity: str | None = None) -> Outputs:
    """The outputs of a frozen network with the head of another network on the same features."""
    weight, bias = (values.detach().cpu().numpy() for values in head_of(model).parameters())
    return replace(outputs, head_weight=weight, head_bias=bias, logits=None, model=identity)
