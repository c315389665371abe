"""Long-tailed recognition: margin calibration and the methods around it.

Names are imported when they are first used, so that `import longtail` and `longtail --help` are quick.
Type checkers and editors see their real types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from longtail import data, losses, metrics, posthoc, sklearn
    from longtail.config import TrainConfig
    from longtail.data.labels import class_counts
    from longtail.errors import UserError
    from longtail.exports import export
    from longtail.metrics.scores import evaluate
    from longtail.outputs.extract import extract
    from longtail.outputs.record import Outputs
    from longtail.posthoc.halo import HALO
    from longtail.posthoc.marc import MARC
    from longtail.posthoc.probe.estimator import Probe
    from longtail.recipes import RECIPES
    from longtail.runs.folder import Run
    from longtail.runs.prediction import load
    from longtail.tasks.calibrate import attach, calibrate
    from longtail.tasks.class_distribution import distribution
    from longtail.tasks.compare import compare
    from longtail.tasks.diagnose import diagnose
    from longtail.training.loop import train
else:
    # Name → module that defines it; the same names as above.
    _MODULES = {
        "HALO": "posthoc.halo",
        "MARC": "posthoc.marc",
        "Outputs": "outputs.record",
        "Probe": "posthoc.probe.estimator",
        "RECIPES": "recipes",
        "Run": "runs.folder",
        "TrainConfig": "config",
        "UserError": "errors",
        "attach": "tasks.calibrate",
        "calibrate": "tasks.calibrate",
        "class_counts": "data.labels",
        "compare": "tasks.compare",
        "diagnose": "tasks.diagnose",
        "distribution": "tasks.class_distribution",
        "evaluate": "metrics.scores",
        "export": "exports",
        "extract": "outputs.extract",
        "load": "runs.prediction",
        "train": "training.loop",
    }
    _PACKAGES = ("data", "losses", "metrics", "posthoc", "sklearn")

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _PACKAGES:
            return import_module(f"longtail.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'longtail' has no attribute {name!r}")
        return getattr(import_module(f"longtail.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return [*globals(), *__all__]


__all__ = [
    "HALO",
    "MARC",
    "RECIPES",
    "Outputs",
    "Probe",
    "Run",
    "TrainConfig",
    "UserError",
    "attach",
    "calibrate",
    "class_counts",
    "compare",
    "data",
    "diagnose",
    "distribution",
    "evaluate",
    "export",
    "extract",
    "load",
    "losses",
    "metrics",
    "posthoc",
    "sklearn",
    "train",
]
