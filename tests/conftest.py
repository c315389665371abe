"""What tests share: the folder of golden numbers and real data, and small finished runs."""

from __future__ import annotations

import json
import os

# The networks of the tests are small: more threads would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.data.cifar import CIFARS

HERE = Path(__file__).resolve().parent


def _shared_folder() -> Path | None:
    given = os.environ.get("LONGTAIL_SHARED")
    folder = Path(given) if given else HERE.parent.parent / "shared"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    """Golden numbers and real data, where they are at hand."""
    folder = _shared_folder()
    if folder is None:
        pytest.skip("golden numbers and real data are not here: set LONGTAIL_SHARED to their folder")
    return folder


@pytest.fixture(scope="session")
def golden(shared: Path):
    """`golden(name)` lists the cases of one file: dictionaries of arrays, with `params` decoded."""

    def read(name: str) -> list[dict[str, Any]]:
        with np.load(shared / "golden" / f"{name}.npz", allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        cases = []
        for number in range(int(arrays["n_cases"])):
            prefix = f"case{number}_"
            case = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
            case["params"] = json.loads(str(case["params"]))
            cases.append(case)
        return cases

    return read


@pytest.fixture(scope="session")
def cifar_root(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 and CIFAR-100 in the python and binary layouts, made from the real images once."""
    root = tmp_path_factory.mktemp("cifar")
    script = str(shared / "data" / "unpack.py")
    for layout in ("python", "binary"):
        commands = [[sys.executable, script, name, str(root / layout), "--layout", layout] for name in CIFARS]
        processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
        assert [process.wait() for process in processes] == [0, 0]
    return root
