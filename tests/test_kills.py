"""Commands killed before operations on files: the short form of `benchmarks/faults.py`."""

import importlib
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "faults.py"


@pytest.fixture(scope="module")
def faults():
    """The benchmark as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PATH.parent))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("SOURCE_DATE_EPOCH", "0")
        yield importlib.import_module("faults")


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import faults
case = next(case for case in faults.CASES if case.name == sys.argv[2])
with faults.warm_folder(report=False) as work:
    row = faults.examine(case, work, int(sys.argv[3]))
print(row["killed before one"], row["same bytes after the next command"])
"""


@pytest.mark.parametrize(("name", "most"), [("train", 6), ("calibrate --overwrite", 6)])
def test_a_killed_command_leaves_what_the_next_one_completes(name, most):
    """In a process of its own, because it forks."""
    import subprocess

    command = [sys.executable, "-c", PROGRAM, str(PATH.parent), name, str(most)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == [str(most), str(most)]


def test_a_file_that_is_not_whole_is_noticed(faults, digits_copy):
    """The check after a kill can fail."""
    faults.require_whole(digits_copy)
    model = digits_copy / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        faults.require_whole(digits_copy)
