"""The packages: built by `make dist`, the same bytes every time, and working where nothing else of ours is."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import longtail

SOURCE = Path(__file__).resolve().parent.parent


def build(source: Path, out: Path, **environment: str) -> dict[str, Path]:
    """`make dist` with this interpreter's packages; file name → file."""
    ready = out.parent / "ready"
    ready.touch()  # this environment is installed already
    words = ["make", "dist", f"BIN={Path(sys.executable).parent}", f"READY={ready}", f"DIST={out}"]
    done = subprocess.run(words, cwd=source, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """The files of this source tree and nothing beside them, as a checkout elsewhere has them."""
    if not (SOURCE / ".git").exists() or shutil.which("make") is None:
        pytest.skip("no git checkout or no make here")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=SOURCE, capture_output=True, text=True, check=True).stdout.splitlines()
    folder = tmp_path_factory.mktemp("checkout") / "longtail"
    for name in names:
        if (SOURCE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(SOURCE / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(checkout, tmp_path_factory) -> dict[str, Path]:
    return build(checkout, tmp_path_factory.mktemp("first") / "dist", SOURCE_DATE_EPOCH="1750000000")


def test_another_build_gives_the_same_bytes(checkout, built, tmp_path):
    """From another folder, with other file times and another umask."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(checkout, copy, copy_function=shutil.copyfile)
    for file in copy.rglob("*"):
        os.utime(file, (1, 1))
        file.chmod(0o700 if file.is_dir() else 0o600)
    again = build(copy, tmp_path / "dist", SOURCE_DATE_EPOCH="1750000000")
    assert again.keys() == built.keys()
    for name, path in built.items():
        assert path.read_bytes() == again[name].read_bytes(), name


def test_the_packages_hold_what_they_should(built):
    version = longtail.__version__
    assert set(built) == {f"longtail-{version}-py3-none-any.whl", f"longtail-{version}.tar.gz"}
    with zipfile.ZipFile(built[f"longtail-{version}-py3-none-any.whl"]) as wheel:
        names = wheel.namelist()
    assert "longtail/py.typed" in names
    assert "longtail/report/assets/page.html" in names
    assert all(name.startswith(("longtail/", f"longtail-{version}.dist-info/")) for name in names)
    with tarfile.open(built[f"longtail-{version}.tar.gz"]) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
    assert {"pyproject.toml", "LICENSE", "Makefile", "tests/conftest.py", "src/longtail/cli/main.py"} <= inside
    assert not any("__pycache__" in name or name.startswith(".venv") for name in inside)


def test_the_wheel_works_in_an_empty_environment(built, tmp_path):
    """Dependencies are borrowed from this interpreter; the library itself comes from the wheel alone."""
    (wheel,) = (path for name, path in built.items() if name.endswith(".whl"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # A path named in a .pth file gives its packages, not its editable installs.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    home = run(str(python), "-c", "import longtail; print(longtail.__file__)").strip()
    assert Path(home).is_relative_to(packages)
    program = str(tmp_path / "venv" / "bin" / "longtail")
    assert run(program, "--version") == f"longtail {longtail.__version__}\n"
    run(program, "train", "digits-lt", "--iterations", "20", "--device", "cpu", "--quiet", "--out", "run")
    assert (tmp_path / "run" / "model.safetensors").is_file()


PLAIN = """
import sys
for name in ("matplotlib", "jinja2", "plotly", "transformers", "lightning", "torchmetrics", "timm", "torchvision"):
    sys.modules[name] = None  # as if it were not installed
import numpy as np
from longtail.cli.main import main
labels = np.repeat([0, 1, 2], [40, 20, 10])
logits = np.eye(3)[labels] + np.random.default_rng(0).normal(size=(70, 3))
np.savez("train.npz", logits=logits, labels=labels)
assert main(["calibrate", "train.npz", "--test", "train.npz", "--out", "out", "--quiet"]) == 0
assert main(["distribution", "digits-lt", "--quiet"]) == 0
assert main(["distribution", "digits-lt", "--plot", "plot.png"]) == 2
assert main(["report", "train.npz", "--test", "train.npz", "--out", "report"]) == 2
"""


def test_a_plain_install_works_and_names_the_extra(tmp_path):
    """Without drawing and without the libraries of the integrations."""
    done = subprocess.run([sys.executable, "-c", PLAIN], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--plot needs matplotlib: pip install 'longtail[report]'" in done.stderr
    assert "a report needs matplotlib, jinja2, plotly: pip install 'longtail[report]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report").exists()
