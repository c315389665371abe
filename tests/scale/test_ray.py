"""A Ray cluster serves as the backend of a comparison without code of ours."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import pytest

import longtail
from longtail.recipes import RECIPES

from .conftest import surroundings

SCRIPT = """
import sys
from dataclasses import replace

import joblib
import ray
from ray.util.joblib import register_ray

import longtail

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    register_ray()
    config = replace(longtail.RECIPES["digits-lt"], epochs=1, device="cpu")
    with joblib.parallel_config(backend="ray"):
        longtail.compare(config, ["softmax", "marc"], sys.argv[1], seeds=(0, 1), jobs=2)
    ray.shutdown()
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_two_ray_workers_give_the_serial_results(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "ray")]
    environment = surroundings(RAY_USAGE_STATS_ENABLED="0")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    config = replace(RECIPES["digits-lt"], epochs=1, device="cpu")
    serial = longtail.compare(config, ["softmax", "marc"], tmp_path / "serial", seeds=(0, 1))
    cells = [json.loads(path.read_text()) for path in (tmp_path / "ray" / "cells").glob("*.json")]
    found = {(cell["method"], cell["seed"]): cell["metrics"] for cell in cells}
    assert found == {(cell["method"], cell["seed"]): cell["metrics"] for cell in serial}
