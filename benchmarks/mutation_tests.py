"""Tests in forks of one process: what each calls and how long it takes, and running chosen ones until one fails."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from common import HERE

ROOT = HERE.parent
SOURCE = ROOT / "src" / "longtail"
LIBRARIES = ("hypothesis.extra.numpy", "sklearn.linear_model", "sklearn.metrics", "sklearn.model_selection")
LIBRARIES += ("sklearn.utils.estimator_checks", "torch._dynamo", "torch.utils.data")
LONGEST = 8.0  # seconds of processor time; tests that take longer are left out
SLOW_FIXTURES = {"cifar_root"}  # minutes: its tests are left out
WAIT = 1800.0  # seconds until a fork that does nothing is ended
OPTIONS = ["-s", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", "--rootdir", str(ROOT)]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported already
Task = TypeVar("Task")


def import_libraries() -> None:
    """What every fork then has; nothing of longtail itself."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True
    for name in LIBRARIES:
        importlib.import_module(name)
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


def forks(
    tasks: list[Task], work: Callable[[Task], bool], jobs: int, end: float = math.inf
) -> Iterator[tuple[Task, bool]]:
    """Do each task in a fork of this process; none is begun after `end`.

    A fork that is ended by a signal answers False.
    """
    waiting, running = tasks[::-1], {}
    while waiting or running:
        if time.monotonic() > end:
            waiting = []
        while waiting and len(running) < jobs:
            task = waiting.pop()
            folder = tempfile.mkdtemp(prefix="mutation-")
            number = os.fork()
            if not number:
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
                os.kill(number, signal.SIGKILL)
                ended, status = os.waitpid(number, 0)
            if ended:
                del running[number]
                shutil.rmtree(folder, ignore_errors=True)
                yield task, status == 0
        time.sleep(0.02)


def in_this_process(files: list[str], action: Callable[[pytest.Session], object]) -> None:
    """Collect the tests of these files and do something with them."""
    pytest.main([*OPTIONS, *files], plugins=[_Collected(action)])


def with_tests(files: list[str], action: Callable[[pytest.Session], object]) -> None:
    """Collect the tests of these files in a fork of this process and do something with them there."""
    number = os.fork()
    if not number:
        try:
            in_this_process(files, action)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(number, 0)


def run(session: pytest.Session, names: list[str], seconds: float) -> bool:
    """Run these tests in this order until one fails; False too if they cannot be imported."""
    from _pytest.main import pytest_runtestloop

    if session.testsfailed:
        return False
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


def measure(paths: list[str], path: Path, jobs: int) -> dict[str, dict[str, Any]]:
    """Test → functions it calls (with its shared fixtures) and seconds; files that did not change are kept."""
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

            for file, done in forks(todo, look, jobs):
                print(f"measured {file}" if done else f"NOT measured: {file}", file=sys.stderr, flush=True)
                if done:
                    known[file] = json.loads((Path(folder) / digests[file]).read_text())
                    path.write_text(json.dumps(known))

    with_tests(paths, collect)
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
