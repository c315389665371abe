"""A training run in MLflow: settings, curves and scores go there while the network is trained.

`trackers=["mlflow"]` (on the command line `--tracker mlflow`) is all it takes; MLFLOW_TRACKING_URI says
where to. `mlflow-skinny` is enough; the store here is a temporary folder.

    python examples/mlflow_tracking.py
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import mlflow

import longtail

store = Path(tempfile.mkdtemp())
mlflow.set_tracking_uri(store.as_uri())
mlflow.set_experiment("long tail")

folder = Path(tempfile.mkdtemp()) / "digits"
longtail.train(replace(longtail.RECIPES["digits-lt"], epochs=10, device="cpu"), folder, trackers=["mlflow"])

client = mlflow.MlflowClient()
(logged,) = client.search_runs([mlflow.get_experiment_by_name("long tail").experiment_id])
losses = client.get_metric_history(logged.info.run_id, "train/loss")
print(f"logged {len(logged.data.params)} parameters and {len(logged.data.metrics)} metrics to {store}")
print("loss", " ".join(f"{point.step}:{point.value:.3f}" for point in losses))
print(f"balanced accuracy on validation images: {100 * logged.data.metrics['validation/balanced']:.1f}")
