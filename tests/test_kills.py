"""Commands that are killed, run out of space or start twice, and fuzzing: the short forms of `benchmarks/fault*.py`."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def faults():
    """The benchmark as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PATH))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("SOURCE_DATE_EPOCH", "0")
        yield importlib.import_module("faults")


def run(program: str) -> str:
    """Run a program of the benchmark's modules in a process of its own, because it forks."""
    command = [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(PATH)!r})\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


KILLS = """
import faults
cases = {case.name: case for case in faults.CASES}
with faults.warm_folder(report=False) as work:
    for name, most in (("train", 6), ("calibrate --overwrite", 6), ("extract, process 1 of 2", 2)):
        row = faults.examine(cases[name], work, most)
        print(row["killed before one"], row["same bytes after the next command"])
"""


def test_a_killed_command_leaves_what_the_next_one_completes():
    assert run(KILLS).splitlines()[-3:] == ["6 6", "6 6", "2 2"]


REFUSALS = """
import fault_refusals as refusals, fault_tools, faults
cases = {case.name: case for case in faults.CASES}
with fault_tools.warm_folder(report=False) as work:
    work.chmod(0o755)
    (work / "said").mkdir()
    refusals.os.environ["FAULTS_SAID"] = str(work / "said")
    print(sorted(refusals.two_at_once(cases["train"], work)))
    print(refusals.disturbed(cases["evaluate"], work, refusals.clock_set_back, refusals.from_the_future))
    print(refusals.forbidden(cases["calibrate"], work))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_two_at_once_a_clock_set_back_and_no_permission():
    assert run(REFUSALS).splitlines()[-3:] == ["['done', 'refused']", "['done']", "['refused']"]


FULL = """
import fault_refusals as refusals, fault_tools, faults, subprocess
case = next(case for case in faults.CASES if case.name == "calibrate --overwrite")
with fault_tools.warm_folder(report=False) as work:
    refusals.os.environ["FAULTS_SAID"] = str(work)
    try:
        with refusals.small_disk() as disk:
            fault_tools.make_photos(disk / "photos")
            print(refusals.full_disk(case, disk, 5).count("refused") > 0, refusals.read_only(case, disk))
    except (subprocess.CalledProcessError, FileNotFoundError):
        print("mount is not permitted")
"""


def test_a_full_disk_is_one_line_and_loses_nothing():
    said = run(FULL).splitlines()[-1]
    if said == "mount is not permitted":
        pytest.skip(said)
    assert said == "True ['refused']"


FUZZ = """
import fault_fuzz as fuzz, pathlib, tempfile
with tempfile.TemporaryDirectory() as folder:
    work = pathlib.Path(folder)
    for inputs, count in ((fuzz.reader_inputs, 600), (fuzz.estimator_inputs, 60)):
        ends, findings = fuzz.block_in_child(inputs(work), 0, count, work)
        print(sum(ends.values()), findings)
    broken = lambda number: fuzz.os.kill(fuzz.os.getpid(), 11) if number == 3 else 1 / 0
    print(len(fuzz.block_in_child(broken, 0, 2, work)[1]), len(fuzz.block_in_child(broken, 3, 5, work)[1]))
"""


def test_fuzzing_finds_nothing_but_answers_and_user_errors():
    """And would find an exception of another kind, or a crash."""
    assert run(FUZZ).splitlines()[-3:] == ["600 []", "60 []", "2 1"]


def test_a_file_that_is_not_whole_is_noticed(faults, digits_copy):
    """The check after a kill can fail."""
    faults.require_whole(digits_copy)
    model = digits_copy / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        faults.require_whole(digits_copy)
