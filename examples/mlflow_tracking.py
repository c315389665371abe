"""A run of longtail in MLflow: read its metrics.jsonl and log parameters, curves and scores.

Every training run writes one JSON line per evaluation, so any tracker can be fed the same way.
`mlflow-skinny` is enough; the store here is a temporary folder.

    python examples/mlflow_tracking.py [RUN]
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import mlflow

import longtail


def log_run(folder: Path) -> str:
    """Log a finished or running training; returns MLflow's id of it."""
    run = longtail.Run.open(folder)
    with mlflow.start_run(run_name=folder.name) as logged:
        mlflow.log_params({name: value for name, value in run.details["config"].items() if value is not None})
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            values = {"loss": entry["loss"], "lr": entry["lr"]}
            values |= {f"validation_{name}": value for name, value in entry.get("validation", {}).items()}
            mlflow.log_metrics({name: value for name, value in values.items() if value is not None}, entry["step"])
    return logged.info.run_id


if len(sys.argv) > 1:
    folder = Path(sys.argv[1])
else:
    folder = Path(tempfile.mkdtemp()) / "digits"
    longtail.train(replace(longtail.RECIPES["digits-lt"], epochs=10, device="cpu"), folder)

store = Path(tempfile.mkdtemp())
mlflow.set_tracking_uri(store.as_uri())
mlflow.set_experiment("long tail")
number = log_run(folder)

client = mlflow.MlflowClient()
losses = client.get_metric_history(number, "loss")
logged = client.get_run(number)
print(f"logged {len(logged.data.params)} parameters and {len(logged.data.metrics)} metrics to {store}")
print("loss", " ".join(f"{point.step}:{point.value:.3f}" for point in losses))
print(f"balanced accuracy on validation images: {100 * logged.data.metrics['validation_balanced']:.1f}")
