"""A Ray cluster serves as the backend of a comparison without code of ours."""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import longtail
from longtail.recipes import RECIPES

from .conftest import surroundings

# The very code of the documentation.
PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
SCRIPT = next(code for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if "import ray" in code)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_two_ray_workers_give_the_serial_results(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    # Ray gives its workers the lowest priority, so that on a busy machine they would hardly run.
    environment = surroundings(RAY_USAGE_STATS_ENABLED="0", RAY_raylet_start_wait_time_s="150", RAY_worker_niceness="0")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    config = replace(RECIPES["digits-lt"], epochs=2)
    longtail.compare(config, ["softmax", "marc"], tmp_path / "serial", seeds=(0, 1))
    together, serial = (metrics_in(tmp_path / name) for name in ("runs/compare", "serial"))
    assert len(serial) == 4
    assert together == serial


def metrics_in(folder):
    """Metrics of the cells of a comparison, by method and seed."""
    cells = [json.loads(path.read_text()) for path in (folder / "cells").glob("*.json")]
    return {(cell["method"], cell["seed"]): cell["metrics"] for cell in cells}
