"""Does a test notice? Small mistakes are put into the source one at a time, and the tests that run the changed place
are run.

A mistake ("mutant") is one changed operator, comparison, constant or condition. It is killed if a test fails (or uses
far more processor time than it should), and survives if all pass. As many mutants of each room as asked are drawn by a
seed.

    python benchmarks/mutation.py --per-room 100 --seed 1

Everything happens in forks of one process that has imported torch and scikit-learn and collected the tests, so a mutant
costs what its tests cost. First every test is run once, to see which functions it calls and how long it takes. A mutant
then meets the tests that call its function, the quickest first, up to a budget of processor time; mutants outside of
functions meet the tests of their file and room. Tests that start processes of their own do not see the mutant there: the
score is a lower bound.

Leaves docs/results/mutation.md with the share killed per room, and every survivor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

os.environ["OMP_NUM_THREADS"] = "1"
sys.dont_write_bytecode = True

import pytest
from common import HERE, write_results
from equivalent_mutants import EQUIVALENT
from mutants import Mutant, mutants_of

ROOT = HERE.parent
SOURCE = ROOT / "src" / "longtail"
# Room → its files, and the tests that a mutant of it meets.
ROOMS = {
    "losses": ("losses/*.py", ["tests/losses", "src/longtail/losses"]),
    "metrics": ("metrics/*.py", ["tests/metrics", "tests/tasks/test_tables.py", "src/longtail/metrics"]),
    "posthoc": ("posthoc/*.py", ["tests/posthoc", "tests/test_sklearn.py", "src/longtail/posthoc"]),
    "tables": ("tasks/tables.py", ["tests/tasks/test_tables.py"]),
    "training": ("training/*.py", ["tests/training"]),
}
LONGEST = 8.0  # seconds of processor time; tests that take longer are left out
SLOW_FIXTURES = {"cifar_root"}  # minutes: its tests are left out
BUDGET = 20.0  # seconds of processor time for the tests of one mutant
WAIT = 1800.0  # seconds until a fork that does nothing is ended
OPTIONS = ["-s", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", "--rootdir", str(ROOT)]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported already
Task = TypeVar("Task")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-room", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--measured", type=Path, default=HERE / ".data" / "mutation.json", help="what each test calls")
    parser.add_argument("--only", default="", help="mutants whose place contains this text; nothing is written")
    options = parser.parse_args()
    _import_libraries()
    files = sorted({file for room in options.rooms for file in ROOMS[room][1]})
    tests = _measure(files, options.measured, options.jobs)
    drawn, possible = [], {}
    for room in options.rooms:
        everything = [mutant for path in sorted(SOURCE.glob(ROOMS[room][0])) for mutant in mutants_of(path)]
        everything = [mutant for mutant in everything if options.only in _where(mutant)]
        possible[room] = len(everything)
        chosen = random.Random(f"{options.seed} {room}").sample(everything, min(options.per_room, len(everything)))
        drawn += [(room, mutant) for mutant in chosen]
    alive = dict(_outcomes(drawn, files, tests, options.jobs))
    if not options.only:
        _write(drawn, alive, possible, options.seed)


def _import_libraries() -> None:
    """What every fork then has; nothing of longtail itself."""
    import hypothesis.extra.numpy
    import sklearn.linear_model
    import sklearn.metrics
    import sklearn.model_selection
    import sklearn.utils.estimator_checks
    import torch._dynamo
    import torch.utils.data

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "src"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "longtail"]:
        del sys.modules[name]  # from benchmarks/common.py


class _Collected:
    """A pytest plugin: when the tests are collected, `action` is done instead of running them."""

    def __init__(self, action: Callable[[pytest.Session], object]) -> None:
        self.action = action

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        phases = [Phase.explicit, Phase.generate]  # a failing example is enough, it need not be the smallest
        settings.register_profile("mutation", settings.get_profile("tests"), phases=phases, database=None)
        settings.load_profile("mutation")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        session.items = [item for item in session.items if not SLOW_FIXTURES & set(getattr(item, "fixturenames", ()))]
        self.action(session)
        return True


def _forks(tasks: list[Task], work: Callable[[Task], bool], jobs: int) -> Iterator[tuple[Task, bool]]:
    """Do each task in a fork of this process; a fork that is ended by a signal answers False."""
    waiting, running = tasks[::-1], {}
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop()
            folder = tempfile.mkdtemp(prefix="mutation-")
            number = os.fork()
            if not number:
                os.setsid()
                os.environ["TMPDIR"] = tempfile.tempdir = folder
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, 1)
                os.dup2(nothing, 2)
                answer = False
                try:
                    answer = work(task)
                finally:
                    os._exit(0 if answer else 1)
            running[number] = (task, time.monotonic(), folder)
        for number, (task, began, folder) in list(running.items()):
            ended, status = os.waitpid(number, os.WNOHANG)
            if not ended and time.monotonic() - began > WAIT:
                os.killpg(number, signal.SIGKILL)
                ended, status = os.waitpid(number, 0)
            if ended:
                del running[number]
                shutil.rmtree(folder, ignore_errors=True)
                yield task, status == 0
        time.sleep(0.02)


def _with_tests(files: list[str], action: Callable[[pytest.Session], object]) -> None:
    """Collect the tests of these files in a fork of this process and do something with them there."""
    number = os.fork()
    if not number:
        try:
            pytest.main([*OPTIONS, *files], plugins=[_Collected(action)])
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(number, 0)


def _run(session: pytest.Session, names: list[str], seconds: float) -> bool:
    """Run these tests in this order until one fails."""
    from _pytest.main import pytest_runtestloop

    limit = int(20 + 5 * seconds + resource.getrusage(resource.RUSAGE_SELF).ru_utime)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    factory._given_basetemp, factory._basetemp = Path(tempfile.gettempdir()) / "pytest", None
    items = {item.nodeid: item for item in session.items}
    session.items = [items[name] for name in names if name in items]
    session.config.option.maxfail = 1
    try:
        pytest_runtestloop(session)
    except (session.Failed, session.Interrupted):
        return False
    return session.testsfailed == 0


# --- which functions a test calls --------------------------------------------------------------------------------


class _Calls:
    """Functions of the library that are called, and processor time, by test and by fixture that tests share."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.fixtures: dict[str, dict[str, Any]] = {}
        self._stack: list[tuple[set[tuple[str, str]], float]] = []

    def trace(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if self._stack and code.co_filename.startswith(str(SOURCE)):
            self._stack[-1][0].add((code.co_filename, code.co_qualname.split(".<locals>")[0]))

    def _measured(self, record: dict[str, Any]) -> Iterator[None]:
        self._stack.append((set(), 0.0))
        began = _processor_time()
        outcome = yield
        calls, inner = self._stack.pop()
        spent = _processor_time() - began
        if self._stack:
            self._stack[-1] = (self._stack[-1][0], self._stack[-1][1] + spent)
        record["calls"] = sorted(f"{Path(file).relative_to(SOURCE)}:{name}" for file, name in calls)
        record["seconds"] = round(spent - inner, 3)
        return outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        return (yield from self._measured(self.fixtures.setdefault(_name(fixturedef), {})))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        info = getattr(item, "_fixtureinfo", None)
        found = [defs[-1] for defs in info.name2fixturedefs.values()] if info else []
        record = self.tests[item.nodeid] = {"fixtures": [_name(one) for one in found if one.scope != "function"]}
        signal.setitimer(signal.ITIMER_PROF, LONGEST)
        return (yield from self._measured(record))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:  # skipped, or it does not bear to be traced
            self.tests[report.nodeid]["left out"] = True


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"more than {LONGEST:g} s of processor time")


def _name(fixturedef: Any) -> str:
    return f"{fixturedef.baseid}::{fixturedef.argname}"


def _processor_time() -> float:
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def _measure(paths: list[str], path: Path, jobs: int) -> dict[str, dict[str, Any]]:
    """Test → functions it calls (with its shared fixtures), and seconds; files of tests that did not change are kept."""
    path.parent.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}

    def collect(session: pytest.Session) -> None:
        files: dict[str, list[str]] = {}
        for item in session.items:
            files.setdefault(str(item.path.relative_to(ROOT)), []).append(item.nodeid)
        digests = {file: hashlib.sha256((ROOT / file).read_bytes()).hexdigest() for file in files}
        todo = [file for file in files if known.get(file, {}).get("digest") != digests[file]]
        with tempfile.TemporaryDirectory() as folder:

            def look(file: str) -> bool:
                calls = _Calls()
                session.config.pluginmanager.register(calls)
                sys.settrace(calls.trace)
                signal.signal(signal.SIGPROF, _too_long)
                items = {item.nodeid: item for item in session.items}
                for number, name in enumerate(files[file]):
                    following = items[files[file][number + 1]] if number + 1 < len(files[file]) else None
                    session.config.hook.pytest_runtest_protocol(item=items[name], nextitem=following)
                sys.settrace(None)
                record = {"digest": digests[file], "tests": calls.tests, "fixtures": calls.fixtures}
                (Path(folder) / digests[file]).write_text(json.dumps(record))
                return True

            for file, done in _forks(todo, look, jobs):
                print(f"measured {file}" if done else f"NOT measured: {file}", file=sys.stderr, flush=True)
                if done:
                    known[file] = json.loads((Path(folder) / digests[file]).read_text())
                    path.write_text(json.dumps(known))

    _with_tests(paths, collect)
    known = json.loads(path.read_text())
    tests = {}
    for file, record in known.items():
        if not any(file.startswith(one) for one in paths):
            continue
        for name, test in record["tests"].items():
            if "left out" in test:
                continue
            fixtures = {one: record["fixtures"][one] for one in test["fixtures"] if one in record["fixtures"]}
            calls = set(test["calls"]).union(*(fixture["calls"] for fixture in fixtures.values()))
            shared = {one: fixture["seconds"] for one, fixture in fixtures.items()}
            tests[name] = {"calls": calls, "seconds": test["seconds"], "shared": shared}
    return tests


def _tests_of(room: str, mutant: Mutant, tests: dict[str, dict[str, Any]]) -> tuple[list[str], float]:
    """Tests that call the changed function, the quickest first, and their seconds."""
    file = str(mutant.path.relative_to(SOURCE))
    folder = f"tests/{'tasks' if room == 'tables' else room}/"
    if mutant.function:
        found = [name for name in tests if f"{file}:{mutant.function}" in tests[name]["calls"]]
    else:
        calling = {name for name in tests if any(call.startswith(f"{file}:") for call in tests[name]["calls"])}
        found = [name for name in tests if name in calling or name.startswith(folder)]
    own = f"{folder}test_{mutant.path.stem}.py"
    found.sort(key=lambda name: (not name.startswith(own), tests[name]["seconds"]))
    chosen, seconds, ready = [], 0.0, set()
    for name in found:
        needed = {one: spent for one, spent in tests[name]["shared"].items() if one not in ready}
        price = tests[name]["seconds"] + sum(needed.values())
        if seconds + price <= BUDGET:
            chosen.append(name)
            seconds += price
            ready |= set(needed)
    return sorted(chosen, key=lambda name: tests[name]["seconds"] + sum(tests[name]["shared"].values())), seconds


# --- putting a mutant in its place -------------------------------------------------------------------------------


def _outcomes(
    drawn: list[tuple[str, Mutant]], files: list[str], tests: dict[str, dict[str, Any]], jobs: int
) -> Iterator[tuple[Mutant, bool]]:
    """Every mutant, and whether it survives."""
    meets = {mutant: _tests_of(room, mutant, tests) for room, mutant in drawn}
    mutants = [mutant for _, mutant in drawn]
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "outcomes"

        def in_functions(session: pytest.Session) -> None:
            functions = _functions()

            def run(mutant: Mutant) -> bool:
                _swap_code(mutant, functions)
                return _run(session, *meets[mutant])

            for mutant, alive in _forks([one for one in mutants if one.function], run, jobs):
                _say(mutant, alive)
                with journal.open("a") as file:
                    file.write(f"{mutants.index(mutant)} {int(alive)}\n")

        _with_tests(files, in_functions)
        for line in journal.read_text().splitlines() if journal.exists() else []:
            number, alive = line.split()
            yield mutants[int(number)], alive == "1"

    def outside(mutant: Mutant) -> bool:
        sys.meta_path.insert(0, _Changed(mutant))
        names, seconds = meets[mutant]
        answer = []
        files = sorted({name.split("::")[0] for name in names})
        pytest.main(
            [*OPTIONS, *files], plugins=[_Collected(lambda session: answer.append(_run(session, names, seconds)))]
        )
        return answer == [True]

    for mutant, alive in _forks([one for one in mutants if not one.function], outside, jobs):
        _say(mutant, alive)
        yield mutant, alive


def _functions() -> dict[tuple[str, str, int], list[Any]]:
    """The functions of the library that exist now, under whatever decorators, by file, name and line."""
    import gc
    from types import FunctionType

    found: dict[tuple[str, str, int], list[Any]] = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(str(SOURCE)):
            code = one.__code__
            found.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(one)
    return found


def _swap_code(mutant: Mutant, functions: dict[tuple[str, str, int], list[Any]]) -> None:
    """Give the live functions of a file the code and the defaults of the changed file."""
    import ast

    def codes(code: Any) -> Iterator[Any]:
        yield code
        for one in code.co_consts:
            if hasattr(one, "co_consts"):
                yield from codes(one)

    for code in codes(mutant.code()):
        for function in functions.get((code.co_filename, code.co_qualname, code.co_firstlineno), ()):
            if len(code.co_freevars) == len(function.__code__.co_freevars):
                function.__code__ = code
    for node in ast.walk(mutant.tree()):
        if isinstance(node, ast.FunctionDef) and (node.args.defaults or node.args.kw_defaults):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            for function in [
                one
                for (file, name, line), many in functions.items()
                if file == str(mutant.path) and line == first and "<locals>" not in name
                for one in many
            ]:

                def value(given: ast.expr, function: Any = function) -> object:
                    return eval(compile(ast.Expression(given), str(mutant.path), "eval"), function.__globals__)

                function.__defaults__ = tuple(value(one) for one in node.args.defaults) or None
                pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                function.__kwdefaults__ = {one.arg: value(given) for one, given in pairs if given is not None} or None


class _Changed:
    """An importer that gives one module its changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is None or spec.origin != str(self.mutant.path):
            return None
        spec.loader.get_code = lambda _: self.mutant.code()  # type: ignore[union-attr,method-assign]
        return spec


# --- what came out -----------------------------------------------------------------------------------------------


def _where(mutant: Mutant) -> str:
    return f"{mutant.path.relative_to(ROOT)}:{mutant.line}: `{mutant.before[:60]}` → `{mutant.after[:60]}`"


def _say(mutant: Mutant, alive: bool) -> None:
    word = "killed  " if not alive else "SURVIVED" if not _reason(mutant) else "the same"
    print(f"{word} {_where(mutant)}", file=sys.stderr, flush=True)


def _reason(mutant: Mutant) -> str | None:
    """Why a mutant computes the same as the source, where that is known."""
    line = mutant.path.read_text(encoding="utf-8").splitlines()[mutant.line - 1].strip()
    return EQUIVALENT.get((str(mutant.path.relative_to(SOURCE)), line, mutant.before, mutant.after))


def _write(drawn: list[tuple[str, Mutant]], alive: dict[Mutant, bool], possible: dict[str, int], seed: int) -> None:
    rows: list[dict[str, object]] = []
    for room, count in possible.items():
        own = [mutant for one, mutant in drawn if one == room]
        same = sum(alive[mutant] and bool(_reason(mutant)) for mutant in own)
        killed = sum(not alive[mutant] for mutant in own)
        rows.append(
            {
                "room": room,
                "possible": count,
                "drawn": len(own),
                "killed": killed,
                "compute the same": same,
                "survived": len(own) - killed - same,
                "killed of drawn, %": f"{100 * killed / len(own):.1f}",
                "killed of those that differ, %": f"{100 * killed / (len(own) - same):.1f}",
            }
        )
    survivors = [mutant for _, mutant in drawn if alive[mutant]]
    listed = [f"- {_escaped(mutant)}" for mutant in survivors if not _reason(mutant)]
    same = [f"- {_escaped(mutant)}: {_reason(mutant)}" for mutant in survivors if _reason(mutant)]
    write_results(
        "mutation",
        "Do the tests notice a mistake?",
        rows,
        f"{len(drawn)} of {sum(possible.values()):,} possible mutants, drawn by seed {seed}: one changed operator, "
        "comparison, constant or condition each. A mutant meets the tests of its room that call the changed function, "
        f"up to {BUDGET:g} s of processor time.\n\n## Survivors\n\n" + ("\n".join(listed) or "none") + "\n\n"
        "## Survivors that compute the same as the source\n\n" + ("\n".join(same) or "none") + "\n\n## Score",
        seed=seed,
    )


def _escaped(mutant: Mutant) -> str:
    return _where(mutant).replace("|", "\\|")


if __name__ == "__main__":
    main()
