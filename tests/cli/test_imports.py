"""What a command does before its work: the heavy packages it imports, by name, not by seconds."""

import shutil
import subprocess
import sys
from pathlib import Path

AFTER = "import sys; print('imported:', {heavy!r} & set(sys.modules))"
DRAWING = {"matplotlib", "plotly"}
COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}  # of torch: nothing here is compiled
LEARNERS = {"sklearn", "scipy", "pandas"}
PARTS_OF_LEARNERS = {"sklearn.metrics", "sklearn.linear_model", "sklearn.model_selection"}


def imported(code: str, heavy: set[str]) -> str:
    command = [sys.executable, "-c", f"{code}\n{AFTER.format(heavy=heavy)}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return done.stdout.splitlines()[-1]


def running(*commands: list[str]) -> str:
    return "from longtail.cli.main import main\n" + "\n".join(f"assert main({words!r}) == 0" for words in commands)


def test_commands_that_fit_nothing_wait_for_no_learners(digits_copy: Path):
    """Training does wait for torch's compiler, which torch's own optimisers import."""
    run = str(digits_copy)
    code = running(["evaluate", run], ["extract", run, "--split", "test"], ["distribution", "digits-lt"])
    code += "\nimport longtail.training.loop, longtail.runs.prediction"
    assert imported(code, LEARNERS | COMPILER | DRAWING) == "imported: set()"


def test_a_whole_calibration_waits_for_nothing_but_scikit_learns_base(digits_copy: Path):
    """The base classes of scikit-learn bring SciPy's statistics and pandas along; these packages are left out."""
    run = str(digits_copy)
    code = running(["calibrate", run], ["calibrate", run, "--method", "disalign"])
    assert imported(code, PARTS_OF_LEARNERS | COMPILER | DRAWING | {"PIL"}) == "imported: set()"  # digits are no files


COLLECTIONS = """
import gc, sys
from longtail.cli.main import main
from longtail.files.progress import Display
collections = []
gc.callbacks.append(lambda phase, details: collections.append(details["generation"]))
def task(*_, **__):
    print(2 in collections, gc.isenabled())
    raise SystemExit
Display.task = task
"""


def test_imports_wait_for_no_full_garbage_collection(digits_copy: Path):
    """A seventh of the start of a calibration was spent in garbage collection, which frees nothing then."""
    shutil.rmtree(digits_copy / "outputs", ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-c", f"{COLLECTIONS}sys.argv[1:] = ['calibrate', {str(digits_copy)!r}]\nmain()"],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stdout.splitlines() == ["False True"]
