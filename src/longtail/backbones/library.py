"""Networks of timm and of Hugging Face as backbones: `timm:NAME`, `hf:NAME` of the Hub, or `hf:FOLDER`.

A network ends before its classifier, so features are the input of that classifier: `num_classes=0` in
timm, `num_labels=0` of `AutoModelForImageClassification` in transformers, or `pooler_output` of `AutoModel` where
transformers has no classifier of that kind. Code from the Hub is never run.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from longtail.backbones import evaluating
from longtail.backbones.weights import load_backbone
from longtail.data.splits import IMAGENET
from longtail.errors import UserError
from longtail.files.reading import expanded, reason

EXTRAS = {"timm": ("timm", "vision"), "hf": ("transformers", "hf")}
INTERPOLATIONS = {0: "bilinear", 2: "bilinear"}  # by the numbers of Pillow; all others are taken as bicubic
CHANNELS = 3  # that these networks take
USUAL_SIDE = 224
PIXELS = "pixel_values"  # the name of images among the inputs of transformers


def library_of(backbone: str) -> str | None:
    """`timm` or `hf`, if the name is that of a network of these libraries."""
    prefix = backbone.partition(":")[0]
    return prefix if prefix in EXTRAS and ":" in backbone else None


def input_settings(backbone: str) -> dict[str, Any]:
    """Fields of `TrainConfig` that a network fixes: how images are prepared for it, and how it is built."""
    name = backbone.partition(":")[2]
    return _timm_settings(name) if library_of(backbone) == "timm" else _hf_settings(name)


class LibraryNetwork(nn.Module):
    """Images (N, C, side, side) to features (N, num_features); grey images are repeated for every input channel.

    Args:
        network: gives features, or an object of transformers that has them.
        backbone: its name, for error messages.
        side: of the images.
        arguments: further arguments of its `forward`.
    """

    def __init__(self, network: nn.Module, backbone: str, side: int, **arguments: Any) -> None:
        super().__init__()
        self.network = network
        self.backbone = backbone
        self.arguments = arguments
        try:
            with evaluating(self):
                width = self(torch.zeros(1, CHANNELS, side, side)).shape[1]
        except UserError:
            raise
        except Exception as error:  # networks refuse an input in different ways
            raise UserError(
                f"{backbone} cannot take images of {side} x {side} pixels ({reason(error)}); give another --image-size"
            ) from error
        self.num_features = int(width)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, CHANNELS, -1, -1)
        output = self.network(images, **self.arguments)
        if not isinstance(output, Tensor):
            output = output.logits if "logits" in output else output.get("pooler_output")
        if output is None or output.flatten(1).shape[1] == 0:
            raise UserError(f"{self.backbone} gives no pooled features")
        return output.flatten(1)

    def feature_map(self, x: Tensor) -> Tensor:
        raise UserError(f"this method needs feature maps, and {self.backbone} gives features; use a ResNet, or softmax")

    early_map = feature_map

    @property
    def last_block(self) -> nn.Module:
        raise UserError(f"this method needs the last block, and {self.backbone} does not name it; use a ResNet")


def build_library(
    backbone: str, side: int, architecture: dict[str, Any], weights: Path | None, pretrained: bool
) -> LibraryNetwork:
    """A network for images of this side.

    Args:
        backbone: `timm:NAME`, `hf:NAME` or `hf:FOLDER`.
        side: of the images.
        architecture: of `input_settings`.
        weights: file of weights to load.
        pretrained: without such a file, load the published weights.
    """
    build = _build_timm if library_of(backbone) == "timm" else _build_hf
    network, native = build(backbone, architecture, pretrained and weights is None)
    if weights is not None:
        load_backbone(network, weights)
    arguments = {}
    if side != native and hasattr(network, "set_input_size"):  # timm's transformers resample their positions
        try:
            cast(Any, network).set_input_size(img_size=(side, side))
        except Exception as error:
            raise UserError(f"{backbone} cannot take images of {side} x {side} pixels: {reason(error)}") from error
    elif side != native and "interpolate_pos_encoding" in inspect.signature(network.forward).parameters:
        arguments["interpolate_pos_encoding"] = True
    return LibraryNetwork(network.float(), backbone, side, **arguments)


def _library(name: str) -> Any:
    """The module of a library; torchvision, which both import, fails with RuntimeError if it does not fit torch."""
    package, extra = EXTRAS[name]
    try:
        return import_module(package)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"--backbone {name}:… needs {package} ({reason(error)}): pip install 'longtail[{extra}]'"
        ) from error


def _timm_settings(name: str) -> dict[str, Any]:
    timm = _library("timm")
    if not timm.is_model(name):
        close = get_close_matches(name, [*timm.list_models(), *timm.list_pretrained()], n=3, cutoff=0.4)
        nearest = f"; the nearest names: {', '.join(close)}" if close else ""
        raise UserError(f"timm has no network {name!r}{nearest}")
    try:
        weights = timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # another tag after the dot
        arch = name.partition(".")[0]
        tags = ", ".join(timm.list_pretrained(f"{arch}.*")) or arch
        raise UserError(f"timm has no weights called {name!r}; choose from: {tags}") from error
    inputs = timm.data.resolve_data_config(pretrained_cfg=weights.to_dict() if weights else {"input_size": None})
    return {
        "image_size": int(inputs["input_size"][-1]),
        "mean": tuple(map(float, inputs["mean"])),
        "std": tuple(map(float, inputs["std"])),
        "interpolation": "bilinear" if inputs["interpolation"] in ("bilinear", "nearest") else "bicubic",
    }


def _build_timm(backbone: str, architecture: dict[str, Any], pretrained: bool) -> tuple[nn.Module, int]:
    timm, name = _library("timm"), backbone.partition(":")[2]
    native = _timm_settings(name)["image_size"]
    with _loading(backbone):
        weights = timm.get_pretrained_cfg(name)
        if pretrained and not (weights and weights.has_weights):
            raise UserError(f"timm has no weights for {name}; give --weights FILE, or --no-pretrained for random ones")
        return timm.create_model(name, pretrained=pretrained, num_classes=0), native


def _hf_settings(name: str) -> dict[str, Any]:
    transformers, source = _library("hf"), _source(name)
    from transformers.models.auto.image_processing_auto import get_image_processor_config

    with _loading(f"hf:{name}", "give a network of the Hub, or hf:FOLDER with its config.json on this machine"):
        config = transformers.AutoConfig.from_pretrained(source, num_labels=0, trust_remote_code=False)
        images = get_image_processor_config(source)
    native = getattr(config, "image_size", None)
    side = (images.get("crop_size") if images.get("do_center_crop", True) else None) or images.get("size") or native
    unit = 255 * images.get("rescale_factor", 1 / 255)  # pixels from 0 to this are normalised
    normal = images.get("do_normalize", True)
    mean = images.get("image_mean", IMAGENET[0]) if normal else (0.0,) * 3
    std = images.get("image_std", IMAGENET[1]) if normal else (1.0,) * 3
    return {
        "image_size": _side(side),
        "mean": tuple(float(value) / unit for value in mean),
        "std": tuple(float(value) / unit for value in std),
        "interpolation": INTERPOLATIONS.get(images.get("resample", 2), "bicubic"),
        "architecture": json.loads(config.to_json_string()),
    }


def _side(size: Any) -> int:
    """A side in pixels, from the ways in which image processors write it."""
    if isinstance(size, dict):
        size = next((size[name] for name in ("height", "shortest_edge", "longest_edge") if name in size), None)
    if isinstance(size, list | tuple):
        size = size[0]
    return int(size) if size else USUAL_SIDE


def _build_hf(backbone: str, architecture: dict[str, Any], pretrained: bool) -> tuple[nn.Module, int]:
    transformers = _library("hf")
    with _loading(backbone):
        config = transformers.AutoConfig.for_model(**architecture)
        classifiers = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        kind = transformers.AutoModelForImageClassification if type(config) in classifiers else transformers.AutoModel
        if not pretrained:
            network = kind.from_config(config)
        else:
            source = _source(backbone.partition(":")[2])
            options = {"config": config, "output_loading_info": True, "trust_remote_code": False}
            with _progress(transformers, shown=sys.stderr.isatty() and not Path(source).is_dir()):
                network, loaded = kind.from_pretrained(source, **options)
            if missing := sorted(loaded["missing_keys"]):
                warnings.warn(
                    f"{len(missing)} tensors of {backbone} are not in its weights and start at random, first "
                    f"{missing[0]}",
                    stacklevel=2,
                )
    if (takes := getattr(network, "main_input_name", PIXELS)) != PIXELS:
        raise UserError(f"{backbone} takes {takes}, not images")
    return network, _side(getattr(config, "image_size", None))


@contextmanager
def _progress(transformers: Any, *, shown: bool) -> Iterator[None]:
    """Progress bars of transformers: of a download in a terminal, and none elsewhere."""
    bars = transformers.utils.logging
    if shown or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()


def _source(name: str) -> str:
    """A folder, if there is one, or the name of a network on the Hub."""
    folder = expanded(name) if name else Path(name)
    return str(folder) if name and folder.is_dir() else name


OTHER_WEIGHTS = "give --weights FILE for weights on this machine, or --no-pretrained for random ones"


@contextmanager
def _loading(backbone: str, advice: str = OTHER_WEIGHTS) -> Iterator[None]:
    """Any failure to find or load a network as one line that says what else to do.

    The messages of the libraries, about the classifier that is left out and every attempt to download, are not shown.
    """
    loggers = [logging.getLogger(name) for name in ("timm", "transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    except UserError:
        raise
    except Exception as error:  # of the Hub, the network, a file
        raise UserError(f"{backbone} cannot be loaded ({reason(error)}); {advice}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
