"""What tests share: the folder of golden numbers and real data, and small finished runs."""

from __future__ import annotations

import importlib.util
import json
import os
import resource

# The networks of the tests are small: more threads would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

import runpy
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import settings

HERE = Path(__file__).resolve().parent
# timm and torchvision, where `make install` puts them; found before anything asks for torchvision.
sys.path.append(str(Path(sys.prefix) / "vision"))
DECLARATIONS = runpy.run_path(str(HERE / "torchvision_operators.py"))

# How long an example takes depends on what else the machine does.
settings.register_profile("tests", deadline=None, max_examples=50)
settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A `FitWarning` is about the data of a fit, and most tests fit on toy data: its own tests make it an error."""
    for item in items:
        if item.path.name not in ("test_gate.py", "test_imbalance.py"):
            item.add_marker(pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning"))


def _shared_folder() -> Path | None:
    given = os.environ.get("LONGTAIL_SHARED")
    folder = Path(given) if given else HERE.parent.parent / "shared"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that tests decode or copy goes to the cache folder of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGTAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
def cifar_features(shared: Path) -> dict[str, np.ndarray]:
    """Real features and logits of a ResNet-32 on CIFAR-10-LT 100: see the README beside the file."""
    with np.load(shared / "data" / "cifar10_lt100_resnet32_features.npz") as file:
        arrays = {name: file[name] for name in file.files}
    weight, bias = arrays["head_weight"].astype(np.float32), arrays["head_bias"].astype(np.float32)

    def logits(features: np.ndarray) -> np.ndarray:
        return features.astype(np.float32) @ weight.T + bias

    return {
        "weight": weight,
        "bias": bias,
        "norms": np.linalg.norm(weight.astype(np.float64), axis=1),
        "y": arrays["train_labels"].astype(np.int64),
        "clean": logits(arrays["train_clean"]),
        "views": np.stack([logits(view) for view in arrays["train_views"]]),
        "view_features": arrays["train_views"].astype(np.float32),
        "test": logits(arrays["test"]),
        "test_features": arrays["test"].astype(np.float32),
        "test_y": arrays["test_labels"].astype(np.int64),
    }


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished training run on long-tailed digits; tests that write into it take a copy."""
    import longtail

    folder = tmp_path_factory.mktemp("runs") / "digits"
    longtail.train(replace(longtail.RECIPES["digits-lt"], device="cpu"), folder)
    files = sorted(folder.rglob("*"))
    yield folder
    assert sorted(folder.rglob("*")) == files, "a test wrote into the run that all tests read: it needs digits_copy"


@pytest.fixture
def digits_copy(digits_run: Path, tmp_path: Path) -> Path:
    """The finished run, to be written into."""
    shutil.copytree(digits_run, tmp_path / "digits")
    return tmp_path / "digits"


@pytest.fixture(scope="session")
def cifar_root(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 and CIFAR-100 in the python and binary layouts, made from the real images once for all workers."""
    folder = tmp_path_factory.getbasetemp()
    root = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cifar"
    with FileLock(f"{root}.lock"):
        if not root.exists():
            spec = importlib.util.spec_from_file_location("unpack", shared / "data" / "unpack.py")
            assert spec is not None
            assert spec.loader is not None
            unpack = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(unpack)
            unpack.shuffled = lru_cache(unpack.shuffled)  # type: ignore[attr-defined]  # decoded once for both layouts
            for binary, layout in enumerate(("python", "binary")):
                unpack.write_cifar10(root / layout, bool(binary))
                unpack.write_cifar100(root / layout, bool(binary))
    return root


@pytest.fixture
def refused():
    """Checks that reading a file gives one line that names it, and takes little memory."""
    from longtail.errors import UserError

    def check(read, path: Path) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(UserError) as error:
            read(path)
        said = str(error.value)
        assert path.name in said
        assert len(said.splitlines()) == 1
        assert len(said) < 600
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # kB: 1 GB

    return check
