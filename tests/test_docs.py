"""Every Python and bash block of README and docs is executed, page by page, in an empty folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import longtail
from longtail.cli.main import main
from longtail.paper.__main__ import main as reproduce

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)\)")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
WITH_CODE = [page for page in PAGES if {"python", "bash"} & {kind for kind, _ in BLOCK.findall(page.read_text())}]


def name_of(page):
    return str(page.relative_to(ROOT))


def run_line(line):
    words = shlex.split(line, comments=True)
    if words[0] == "longtail":
        assert main(words[1:]) == 0, line
    elif words[:3] == ["python", "-m", "longtail.paper"]:
        assert reproduce(words[3:]) == 0, line
    else:
        assert words[0] == "torchrun", line
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *words[1:]], check=True)


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": "page"}
    for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        # Ray's processes outlive a test: tests/distributed/test_ray.py runs that block in a separate process.
        if kind == "python" and "import ray" not in code:
            exec(compile(code, name_of(page), "exec"), names)
        elif kind == "bash":
            for line in code.replace("\\\n", " ").strip().splitlines():
                run_line(line)
    if page.name == "README.md":
        check_numbers(page.read_text(encoding="utf-8"), capsys.readouterr().out)


def check_numbers(text, printed):
    """The README's numbers are what its code prints, up to the rounding of another processor."""
    for score, said in {
        "balanced": r"Balanced accuracy: ([\d.]+\d), by MARC ([\d.]+\d), by HALO ([\d.]+\d)\.",
        "top-1 as in training": r"frequent as in training: ([\d.]+\d), ([\d.]+\d), ([\d.]+\d)\.",
    }.items():
        now = [float(value) for value in re.findall(rf"{score} ([\d.]+)", printed)]
        assert now == pytest.approx([float(value) for value in re.search(said, text).groups()], abs=0.02), score
    (estimate,) = re.findall(r"accuracy ([\d.]+) \[", text)
    assert float(printed.splitlines()[-1].split()[0]) == pytest.approx(float(estimate), abs=0.05)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    missing = [target for target in LINK.findall(text) if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if "results" not in page.parts], ids=name_of)
def test_files_that_a_page_names_exist(page):
    files = re.findall(r"\b((?:tests|src|benchmarks|examples)/[\w/.-]+\.py)", page.read_text(encoding="utf-8"))
    assert not [file for file in files if not (ROOT / file).exists()]


def test_every_page_is_in_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} | {"results/first-screens.md"}
    assert pages == {line.split(": ")[-1] for line in navigation.splitlines() if line.endswith(".md")}


def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    reference = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    for name in set(longtail.__all__) - {"RECIPES"}:  # a table
        if not isinstance(getattr(longtail, name), ModuleType):
            assert f'id="longtail.{name}"' in reference, name
