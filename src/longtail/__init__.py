"""Long-tailed recognition: margin calibration and the methods around it.

Names are imported when they are first used, so that `import longtail` and `longtail --help` are quick.
"""

from __future__ import annotations

import importlib
from typing import Any

from longtail.core.version import __version__ as __version__

_HOMES = {
    "CRT": "longtail.posthoc.crt",
    "DisAlign": "longtail.posthoc.disalign",
    "LWS": "longtail.posthoc.lws",
    "LogitAdjustment": "longtail.posthoc.logit_adjustment",
    "MARC": "longtail.posthoc.marc",
    "PlattScaling": "longtail.posthoc.scaling",
    "TauNorm": "longtail.posthoc.tau_norm",
    "TemperatureScaling": "longtail.posthoc.scaling",
    "VectorScaling": "longtail.posthoc.scaling",
    "Outputs": "longtail.outputs",
    "calibrate": "longtail.tasks.calibrate",
    "compare": "longtail.tasks.compare",
    "diagnose": "longtail.tasks.diagnose",
    "export": "longtail.exports",
    "extract": "longtail.extraction.model",
    "find_head": "longtail.networks.head",
    "open_splits": "longtail.data",
    "margins": "longtail.metrics.margins",
    "profile": "longtail.tasks.class_distribution",
    "UserError": "longtail.errors",
    "Run": "longtail.runs",
    "TrainConfig": "longtail.config",
    "RECIPES": "longtail.recipes",
    "evaluate_logits": "longtail.metrics",
    "evaluate_predictions": "longtail.metrics",
    "train": "longtail.training.loop",
}

_ROOMS = ("losses", "networks", "sklearn")

__all__ = sorted([*_HOMES, *_ROOMS])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"longtail.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'longtail' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES, *_ROOMS]
