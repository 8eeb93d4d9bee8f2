"""The size of the house, room by room, and its circles of imports.

    python scripts/mass.py            # the table; `make mass`
    python scripts/mass.py --circles  # fails where modules import one another in a circle; `make lint`

Every import counts: those inside functions and under ``TYPE_CHECKING`` as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "lmeval_dispersion": ROOT / "lmeval_dispersion",
    "lmeval_screener": ROOT / "screener/lmeval_screener",
}
AREAS = ("tests", "benchmarks", "scripts", "examples")


def tracked(folder: str) -> list[Path]:
    """The Python files of a folder that git knows."""
    names = subprocess.run(
        ["git", "ls-files", "-z", f"{folder}/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).exists()]


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def module_name(path: Path, package: str) -> str:
    parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of ours that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            # A package that hands on a name of a module is not the module's user.
            names |= {name if name in modules else node.module for name in inside}
    return names & modules.keys()


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def main() -> int:
    sources = {
        module_name(path, package): path
        for package, folder in PACKAGES.items()
        for path in tracked(str(folder.relative_to(ROOT)))
    }
    graph = {name: imports(path, sources) - {name} for name, path in sources.items()}
    if "--circles" in sys.argv:
        around = circle(graph)
        if around:
            print(f"circle of imports: {' -> '.join(around)}", file=sys.stderr)
        return 1 if around else 0
    rooms: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, path in sources.items():
        package, *rest = name.split(".")
        is_room = len(rest) > 1 or path.name == "__init__.py"
        room = f"{package}/{rest[0]}" if rest and is_room else package
        rooms[room] += lines(path)
        files[room] += 1
    for room, total in sorted(rooms.items()):
        print(f"{room:<34} {total:>7,} lines {files[room]:>4} modules")
    print(f"{'source':<34} {sum(rooms.values()):>7,} lines {len(sources):>4} modules")
    for area in AREAS:
        paths = tracked(area)
        print(f"{area:<34} {sum(map(lines, paths)):>7,} lines {len(paths):>4} modules")
    print(f"circle of imports: {' -> '.join(circle(graph)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
