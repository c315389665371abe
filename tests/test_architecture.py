"""The floor plan: rooms stand in one strict order, and no file of a lower room imports an upper one."""

import ast
from pathlib import Path

import longtail

PACKAGE = Path(longtail.__file__).parent
# Rooms of one entry stand side by side: neither may import the other, except a file its own room.
ORDER = [
    {"errors"},
    {"files"},
    {"launch"},
    {"distributed"},
    {"config"},
    {"recipes"},
    {"data"},
    {"backbones"},
    {"losses"},
    {"heads"},
    {"networks"},
    {"outputs"},
    {"metrics"},
    {"posthoc"},
    {"methods"},
    {"runs"},
    {"training"},
    {"tasks"},
    {"report"},
    {"paper"},
    {"exports"},
    {"sklearn", "integrations"},
    {"cli"},
]
FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}
HALL = {"__init__", "__main__"}  # the front door: it may open every room


def room_of(path: Path) -> str:
    if path.stem == "__main__":  # a program: it may open every room
        return "__main__"
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, room) of everything a file imports from this package, inside functions and for types only too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: imports name their room in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "__version__"]
        else:
            continue
        parts = [name.split(".") for name in names]
        found += [(node.lineno, [*name, "__init__"][1]) for name in parts if name[0] == "longtail"]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_has_a_room_and_the_hall_is_small():
    assert {room_of(path) for path in FILES} <= set(FLOOR) | HALL
    in_the_hall = {path.stem for path in PACKAGE.glob("*.py")}
    assert in_the_hall == {*HALL, "errors", "launch", "distributed", "config", "recipes", "methods", "sklearn"}


def test_no_room_imports_an_upper_one():
    wrong = []
    for path in FILES:
        own = room_of(path)
        if own in HALL:
            continue
        for line, other in imports_of(path):
            if other in HALL or (other != own and FLOOR[other] >= FLOOR[own]):
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {other}")
    assert wrong == []
