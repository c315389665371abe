"""Does a test notice? Small mistakes are put into the source one at a time, and the tests that run the changed place
are run.

A mistake ("mutant") is one changed operator, comparison, constant or condition. It is killed if a test fails (or uses
far more processor time than it should), and survives if all pass. As many mutants of each room as asked are drawn by a
seed.

    python benchmarks/mutation.py --per-room 100 --seed 1

With --minutes M no mutant is begun after that; the page says how many of those drawn have no outcome. Mutants are met
in the order of the draw, those outside of functions in the last sixth of the time. With --outcomes FILE every outcome
is kept as soon as it is known, and a later call with the same seed goes on from there, unless the mutant's file has
changed since: rooms can be done one after the other, and the last call writes the page of all of them.

Everything happens in forks of one process that has imported torch and scikit-learn and collected the tests, so a mutant
costs what its tests cost. First every test is run once, to see which functions it calls and how long it takes. A mutant
then meets the tests that call its function, the quickest first, up to a budget of processor time; mutants outside of
functions meet the tests of their file and room, and all meet the room's table of defaults. Tests that start processes
of their own do not see the mutant there: the score is a lower bound.

Leaves docs/results/mutation.md with the share killed per room, and every survivor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from common import HERE, write_results
from equivalent_mutants import EQUIVALENT
from mutant_code import functions_of, import_changed, swap_code
from mutants import Mutant, mutants_of
from mutation_tests import LONGEST, ROOT, SOURCE, forks, import_libraries, in_this_process, measure, run, with_tests

BUDGET = 8.0  # seconds of processor time for the tests of one mutant
TRAINING_TESTS = ("defaults", "steps", "trackers")
# Room → its files, and the tests that a mutant of it meets.
ROOMS = {
    "losses": ("losses/*.py", ["tests/losses", "src/longtail/losses"]),
    "metrics": ("metrics/*.py", ["tests/metrics", "tests/tasks/test_tables.py", "src/longtail/metrics"]),
    "posthoc": ("posthoc/**/*.py", ["tests/posthoc", "src/longtail/posthoc"]),
    "tables": ("tasks/table*.py", ["tests/tasks/test_tables.py"]),
    # Not those that train whole runs, test_run.py and test_faults.py: they take minutes.
    "training": ("training/*.py", [f"tests/training/test_{name}.py" for name in TRAINING_TESTS]),
}
# Tests that compare every default of a room.
DEFAULTS = ("tests/posthoc/test_pinned.py::test_defaults", "tests/losses/test_common.py::test_a_loss_shows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-room", type=int, nargs="+", default=[100], help="one number, or one for each room")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--measured", type=Path, default=HERE / ".data" / "mutation.json", help="what each test calls")
    parser.add_argument("--only", default="", help="mutants whose place contains this text; nothing is written")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no mutant after that")
    unnamed = Path(tempfile.mkdtemp(prefix="mutation-")) / "outcomes"
    parser.add_argument("--outcomes", type=Path, default=unnamed, help="kept here, so that a later call goes on")
    options = parser.parse_args()
    began = time.monotonic()
    ends = [began + 60 * options.minutes * share for share in (5 / 6, 1)]
    drawn, possible = [], {}
    sizes = options.per_room * (len(options.rooms) if len(options.per_room) == 1 else 1)
    for room, size in zip(options.rooms, sizes, strict=True):
        everything = [mutant for path in sorted(SOURCE.glob(ROOMS[room][0])) for mutant in mutants_of(path)]
        everything = [mutant for mutant in everything if options.only in _where(mutant)]
        possible[room] = len(everything)
        # Each place has a random number of its own: a larger draw by the same seed contains the smaller one, and a file
        # that changes leaves the draws of the others as they are.
        everything.sort(key=lambda one: random.Random(f"{options.seed} {one.path.name} {one.number}").random())
        chosen = everything[:size]
        drawn += [(room, mutant) for mutant in chosen]
    known = _known(options.outcomes, options.seed)
    todo = [(room, mutant) for room, mutant in drawn if _key(mutant) not in known]
    if todo and options.minutes > 0:
        import_libraries()
        files = sorted({file for room, _ in todo for file in ROOMS[room][1]})
        tests = measure(files, options.measured, options.jobs)

        def keep(mutant: Mutant, survives: bool) -> None:  # in a fork: the file is how others know
            _say(mutant, survives)
            with options.outcomes.open("a", encoding="utf-8") as file:
                file.write(json.dumps([options.seed, *_key(mutant), survives]) + "\n")

        _meet(todo, files, tests, options.jobs, ends, keep)
        known = _known(options.outcomes, options.seed)
    alive = {mutant: known[_key(mutant)] for _, mutant in drawn if _key(mutant) in known}
    if not options.only:
        _write(drawn, alive, possible, options.seed)


def _tests_of(room: str, mutant: Mutant, tests: dict[str, dict[str, Any]]) -> tuple[list[str], float]:
    """Tests that call the changed function, the quickest first, and their seconds."""
    file = str(mutant.path.relative_to(SOURCE))
    folder = f"tests/{'tasks' if room == 'tables' else room}/"
    if mutant.function:
        calling = {name for name in tests if f"{file}:{mutant.function}" in tests[name]["calls"]}
        found = [name for name in tests if name in calling or name.startswith((f"{folder}test_defaults.py", *DEFAULTS))]
    else:
        calling = {name for name in tests if any(call.startswith(f"{file}:") for call in tests[name]["calls"])}
        found = [name for name in tests if name in calling or name.startswith(folder)]
    own = f"{folder}test_{mutant.path.stem}.py"
    price_of = {name: tests[name]["seconds"] + sum(tests[name]["shared"].values()) for name in found}
    found.sort(key=lambda name: (not name.startswith(own), price_of[name]))
    chosen, seconds, ready = [], 0.0, set()
    for name in found:
        needed = {one: spent for one, spent in tests[name]["shared"].items() if one not in ready}
        price = tests[name]["seconds"] + sum(needed.values())
        if seconds + price <= BUDGET:
            chosen.append(name)
            seconds += price
            ready |= set(needed)
    return sorted(chosen, key=price_of.__getitem__), seconds


def _meet(
    todo: list[tuple[str, Mutant]],
    files: list[str],
    tests: dict[str, dict[str, Any]],
    jobs: int,
    ends: list[float],
    keep: Callable[[Mutant, bool], None],
) -> None:
    """Let mutants meet their tests and `keep` whether they survive; `ends`: in functions, and outside of them."""
    meets = {mutant: _tests_of(room, mutant, tests) for room, mutant in todo}
    mutants = [mutant for _, mutant in todo]

    def in_functions(session: pytest.Session) -> None:
        functions = functions_of(str(SOURCE))

        def meet(mutant: Mutant) -> bool:
            swap_code(mutant, functions)
            return run(session, *meets[mutant])

        for mutant, alive in forks([one for one in mutants if one.function], meet, jobs, ends[0]):
            keep(mutant, alive)

    with_tests(files, in_functions)

    def outside(mutant: Mutant) -> bool:
        import_changed(mutant)
        names, seconds = meets[mutant]
        answer = []
        # pytest imports a file of the source that it is given by itself, past the change.
        files = sorted({name.split("::")[0] for name in names if not name.startswith("src/")})
        in_this_process(files, lambda session: answer.append(run(session, names, seconds)))
        return answer == [True]

    for mutant, alive in forks([one for one in mutants if not one.function], outside, jobs, ends[1]):
        keep(mutant, alive)


Key = tuple[str, int, str]  # file, number of the place, digest of the file


def _key(mutant: Mutant) -> Key:
    return str(mutant.path.relative_to(SOURCE)), mutant.number, _digest(mutant.path)


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _known(path: Path, seed: int) -> dict[Key, bool]:
    """Outcomes of earlier calls with this seed: whether the mutant survived."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {tuple(key): alive for own, *key, alive in map(json.loads, lines) if own == seed}  # type: ignore[misc]


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
        met = [mutant for mutant in own if mutant in alive]
        same = sum(alive[mutant] and bool(_reason(mutant)) for mutant in met)
        killed = sum(not alive[mutant] for mutant in met)
        rows.append(
            {
                "room": room,
                "possible": count,
                "drawn": len(own),
                "no outcome": len(own) - len(met),
                "killed": killed,
                "compute the same": same,
                "survived": len(met) - killed - same,
                "killed of those met, %": _share(killed, len(met)),
                "killed of those that differ, %": _share(killed, len(met) - same),
            }
        )
    survivors = [mutant for _, mutant in drawn if alive.get(mutant)]
    listed = [f"- {_escaped(mutant)}" for mutant in survivors if not _reason(mutant)]
    same = [f"- {_escaped(mutant)}: {_reason(mutant)}" for mutant in survivors if _reason(mutant)]
    waiting = [mutant for _, mutant in drawn if mutant not in alive]
    outside = sum(not mutant.function for mutant in waiting)
    missing = (
        f" {len(waiting)} of those drawn have no outcome, because the time was over: {outside} outside of functions "
        f"(constants and class bodies), {len(waiting) - outside} in functions. They are not in the score."
        if waiting
        else " Every mutant drawn has an outcome."
    )
    write_results(
        "mutation",
        "Do the tests notice a mistake?",
        rows,
        f"{len(drawn)} of {sum(possible.values()):,} possible mutants, drawn by seed {seed}: one changed operator, "
        f"comparison, constant or condition each.{missing} A mutant meets the tests of its room that call the changed "
        f"function, up to {BUDGET:g} s of processor time. Tests that take more than {LONGEST:g} s by themselves, those "
        "on CIFAR, those that train whole runs (tests/training/test_run.py, test_faults.py), and processes that a "
        "test starts do not see a mutant: the whole suite may kill more.\n\n"
        "## Survivors\n\n" + ("\n".join(listed) or "none") + "\n\n"
        "## Survivors that compute the same as the source\n\n" + ("\n".join(same) or "none") + "\n\n## Score",
        seed=seed,
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "—"


def _escaped(mutant: Mutant) -> str:
    return _where(mutant).replace("|", "\\|")


if __name__ == "__main__":
    main()
