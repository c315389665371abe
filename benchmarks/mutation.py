"""Does a test notice? Small mistakes are put into the source one at a time, and the tests of that room are run.

A mistake ("mutant") is one changed operator, comparison, constant or condition. It is killed if a test fails (or does
not end in time), and survives if all pass. Mutants are drawn by a seed, as many of each file as its share of the
places that can be changed; the file's own tests run first, then those of its room.

    python benchmarks/mutation.py --mutants 120

Leaves docs/results/mutation.md with the share killed per room, and every survivor.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import HERE, shared_folder, write_results

ROOT = HERE.parent
ROOMS = ("losses", "posthoc", "metrics")
SECONDS = 600
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Mutant:
    """One changed place: the file, its line, what was changed into what, and the whole changed source."""

    path: Path
    line: int
    before: str
    after: str
    source: str

    @property
    def room(self) -> str:
        return self.path.parent.name


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    text = path.read_text(encoding="utf-8")
    count = len(list(_places(ast.parse(text))))
    for number in range(count):
        tree = ast.parse(text)
        node, change = list(_places(tree))[number]
        before = ast.unparse(node)
        changed = change(copy.deepcopy(node))
        _replace(tree, node, changed)
        yield Mutant(path, node.lineno, before, ast.unparse(changed), ast.unparse(ast.fix_missing_locations(tree)))


def _places(tree: ast.AST) -> Iterator[tuple[ast.expr, object]]:
    """Expressions that can be changed, and how."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not _is_text(node):
            yield node, _swap_operator
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield node, _swap_comparison
        elif isinstance(node, ast.BoolOp):
            yield node, _swap_operator
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield node, lambda one: one.operand
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
        ):
            yield node, lambda one: ast.Constant(one.value + 1)


def _is_text(node: ast.BinOp) -> bool:
    parts = (node.left, node.right)
    return any(isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str) for part in parts)


def _swap_operator(node):  # type: ignore[no-untyped-def]
    node.op = SWAPS[type(node.op)]()
    return node


def _swap_comparison(node):  # type: ignore[no-untyped-def]
    node.ops[0] = SWAPS[type(node.ops[0])]()
    return node


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list) and old in value:
                value[value.index(old)] = new


def survives(mutant: Mutant, copy_of_repository: Path) -> bool:
    """Run the tests on the changed source."""
    place = copy_of_repository / mutant.path.relative_to(ROOT)
    original = place.read_text(encoding="utf-8")
    place.write_text(mutant.source, encoding="utf-8")
    try:
        return all(_passes(words, copy_of_repository) for words in _tests(mutant))
    finally:
        place.write_text(original, encoding="utf-8")


def _tests(mutant: Mutant) -> list[list[str]]:
    """The file's own tests, then those of its room."""
    room = f"tests/{mutant.room}"
    own = f"{room}/test_{mutant.path.stem}.py"
    return [[own], [room, f"--deselect={own}"]] if (ROOT / own).is_file() else [[room]]


def _passes(words: list[str], folder: Path) -> bool:
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "src"),
        "LONGTAIL_SHARED": str(shared_folder()),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # two sources of one second must not share bytecode
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *words]
    try:
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=120)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS))
    options = parser.parse_args()
    files = [path for room in options.rooms for path in sorted((ROOT / "src" / "longtail" / room).glob("*.py"))]
    everything = [mutant for path in files for mutant in mutants_of(path)]
    drawn = random.Random(options.seed).sample(everything, min(options.mutants, len(everything)))
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / str(number) for number in range(options.jobs)]
        for one in copies:
            shutil.copytree(ROOT, one, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "site", "demo", ".data"))
        free = list(copies)

        def run(mutant: Mutant) -> bool:
            mine = free.pop()
            try:
                alive = survives(mutant, mine)
            finally:
                free.append(mine)
            print(f"{'SURVIVED' if alive else 'killed  '} {_where(mutant)}", file=sys.stderr, flush=True)
            return alive

        with ThreadPoolExecutor(options.jobs) as pool:
            alive = list(pool.map(run, drawn))
    _write(drawn, alive, len(everything), options.seed)


def _where(mutant: Mutant) -> str:
    return f"{mutant.path.relative_to(ROOT)}:{mutant.line}: `{mutant.before[:60]}` → `{mutant.after[:60]}`"


def _write(drawn: list[Mutant], alive: list[bool], possible: int, seed: int) -> None:
    rows: list[dict[str, object]] = []
    for room in sorted({mutant.room for mutant in drawn}):
        own = [lives for mutant, lives in zip(drawn, alive, strict=True) if mutant.room == room]
        killed = len(own) - sum(own)
        rows.append({"room": room, "mutants": len(own), "killed": killed, "killed, %": round(100 * killed / len(own))})
    survivors = [_where(mutant).replace("|", "\\|") for mutant, lives in zip(drawn, alive, strict=True) if lives]
    listed = "\n".join(f"- {one}" for one in survivors) or "none"
    write_results(
        "mutation",
        "Do the tests notice a mistake?",
        rows,
        f"{len(drawn)} of {possible:,} possible mutants, drawn by seed {seed}: one changed operator, comparison, "
        f"constant or condition each. The survivors, some of which compute the same as before:\n\n{listed}",
    )


if __name__ == "__main__":
    main()
