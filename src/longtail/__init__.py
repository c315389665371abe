"""Long-tailed recognition: margin calibration and the methods around it.

Names are imported when they are first used, so that `import longtail` and `longtail --help` are quick.
Type checkers and editors see their real types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longtail.core.version import __version__ as __version__

if TYPE_CHECKING:
    from longtail import backbones, data, losses, metrics, networks, posthoc, sklearn
    from longtail.config import TrainConfig
    from longtail.data.counts import class_counts
    from longtail.data.open import open_splits
    from longtail.errors import UserError
    from longtail.exports import export
    from longtail.extraction.finding import find_head
    from longtail.extraction.model import extract
    from longtail.metrics.margins import margins
    from longtail.metrics.scores import evaluate_logits, evaluate_predictions
    from longtail.outputs.record import Outputs
    from longtail.posthoc.auto import Auto
    from longtail.posthoc.crt import CRT
    from longtail.posthoc.disalign import DisAlign
    from longtail.posthoc.halo import HALO
    from longtail.posthoc.logit_adjustment import LogitAdjustment
    from longtail.posthoc.lws import LWS
    from longtail.posthoc.marc import MARC
    from longtail.posthoc.platt import PlattScaling
    from longtail.posthoc.scaling import MatrixScaling, TemperatureScaling, VectorScaling
    from longtail.posthoc.tau_norm import TauNorm
    from longtail.posthoc.tempered import Tempered
    from longtail.recipes import RECIPES
    from longtail.runs.folder import Run
    from longtail.runs.prediction import load
    from longtail.tasks.attach import attach
    from longtail.tasks.calibrate import calibrate
    from longtail.tasks.class_distribution import distribution
    from longtail.tasks.class_distribution import distribution as profile
    from longtail.tasks.compare import compare
    from longtail.tasks.diagnose import diagnose
    from longtail.training.defaults import recipe_for
    from longtail.training.loop import train
else:
    # Name → module that defines it; the same names as above.
    _HOMES = {
        "Auto": "posthoc.auto",
        "CRT": "posthoc.crt",
        "DisAlign": "posthoc.disalign",
        "HALO": "posthoc.halo",
        "LWS": "posthoc.lws",
        "LogitAdjustment": "posthoc.logit_adjustment",
        "MARC": "posthoc.marc",
        "MatrixScaling": "posthoc.scaling",
        "Outputs": "outputs.record",
        "PlattScaling": "posthoc.platt",
        "RECIPES": "recipes",
        "Run": "runs.folder",
        "TauNorm": "posthoc.tau_norm",
        "Tempered": "posthoc.tempered",
        "TemperatureScaling": "posthoc.scaling",
        "TrainConfig": "config",
        "UserError": "errors",
        "VectorScaling": "posthoc.scaling",
        "attach": "tasks.attach",
        "calibrate": "tasks.calibrate",
        "class_counts": "data.counts",
        "compare": "tasks.compare",
        "diagnose": "tasks.diagnose",
        "distribution": "tasks.class_distribution",
        "evaluate_logits": "metrics.scores",
        "evaluate_predictions": "metrics.scores",
        "export": "exports",
        "extract": "extraction.model",
        "find_head": "extraction.finding",
        "load": "runs.prediction",
        "margins": "metrics.margins",
        "open_splits": "data.open",
        "recipe_for": "training.defaults",
        "train": "training.loop",
    }
    _EARLIER_NAMES = {"profile": "distribution"}
    _ROOMS = ("backbones", "data", "losses", "metrics", "networks", "posthoc", "sklearn")

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        name = _EARLIER_NAMES.get(name, name)
        if name in _ROOMS:
            return import_module(f"longtail.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'longtail' has no attribute {name!r}")
        return getattr(import_module(f"longtail.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return [*globals(), *__all__]


__all__ = [
    "CRT",
    "HALO",
    "LWS",
    "MARC",
    "RECIPES",
    "Auto",
    "DisAlign",
    "LogitAdjustment",
    "MatrixScaling",
    "Outputs",
    "PlattScaling",
    "Run",
    "TauNorm",
    "TemperatureScaling",
    "Tempered",
    "TrainConfig",
    "UserError",
    "VectorScaling",
    "attach",
    "backbones",
    "calibrate",
    "class_counts",
    "compare",
    "data",
    "diagnose",
    "distribution",
    "evaluate_logits",
    "evaluate_predictions",
    "export",
    "extract",
    "find_head",
    "load",
    "losses",
    "margins",
    "metrics",
    "networks",
    "open_splits",
    "posthoc",
    "profile",
    "recipe_for",
    "sklearn",
    "train",
]
