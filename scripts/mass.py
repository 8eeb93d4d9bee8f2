"""The size and the density of the house, room by room, and its circles of imports.

    python scripts/mass.py            # the tables; `make mass`
    python scripts/mass.py --reach    # also: the share of statements that the main jobs execute
    python scripts/mass.py --circles  # fails where modules import one another in a circle; `make lint`

Size is counted in tokens, which width and wrapping do not move; lines have no limit. Density is counted per
line of code: a line with a token that is neither a comment nor a docstring. Every import counts: those inside
functions and under ``TYPE_CHECKING`` as well.
"""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "lmeval_dispersion": ROOT / "lmeval_dispersion",
    "lmeval_screener": ROOT / "screener/lmeval_screener",
}
AREAS = ("tests", "benchmarks", "scripts", "examples")

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# What others have, by this count, in the autumn of 2026: tokens, tokens a line.
ANCHORS = {
    "httpx": (35_722, 6.2),
    "sqlite-utils": (48_088, 5.6),
    "mergekit": (73_909, 6.1),
    "lm-eval without tasks": (100_936, 6.0),
    "torchmetrics": (249_707, 8.0),
    "trl": (258_544, 6.8),
    "huggingface_hub": (269_707, 6.0),
    "peft": (277_061, 6.9),
}
# Of all twelve anchors: tokens a line; per thousand lines of code the other three.
ANCHOR_RANGES = ("5.5-8.0", "0-2.5", "8-29", "0-20")

# The main jobs that need neither a network nor torch; coverage of these is the reach.
JOBS = (
    ("lmeval_screener", "--demo"),
    ("lmeval_screener", "--demo", "--details", "--output", "page.html"),
    ("lmeval_screener", "--demo", "--registry", "nightly.db"),
    ("lmeval_screener", "--demo", "--registry", "nightly.db"),
    ("lmeval_dispersion", "race", "--demo"),
    ("lmeval_dispersion", "audit", "--demo"),
    ("lmeval_dispersion", "compare", "--demo"),
)


@dataclass
class Mass:
    """Counts over modules; they add up."""

    modules: int = 0
    tokens: int = 0
    lines: int = 0  # of code
    packed: int = 0  # assignments of several values to several names
    comprehensions: int = 0
    conditionals: int = 0  # conditional expressions

    @classmethod
    def of(cls, path: Path) -> Mass:
        """The counts of one module."""
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        docstrings = _docstring_lines(tree)
        mass = cls(modules=1)
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in _LAYOUT or token.start[0] in docstrings:
                continue
            mass.tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
        mass.lines = len(lines)
        for node in ast.walk(tree):
            if isinstance(node, _COMPREHENSIONS):
                mass.comprehensions += 1
            elif isinstance(node, ast.IfExp):
                mass.conditionals += 1
            elif isinstance(node, ast.Assign):
                pair = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
                mass.packed += pair
        return mass

    def __add__(self, other: Mass) -> Mass:
        return Mass(
            modules=self.modules + other.modules,
            tokens=self.tokens + other.tokens,
            lines=self.lines + other.lines,
            packed=self.packed + other.packed,
            comprehensions=self.comprehensions + other.comprehensions,
            conditionals=self.conditionals + other.conditionals,
        )

    def row(self, name: str) -> str:
        """The counts as a line of the table."""
        lines = max(self.lines, 1)
        densities = [
            f"{1000 * count / lines:>9.1f}"
            for count in (self.packed, self.comprehensions, self.conditionals)
        ]
        return (
            f"{name:<34} {self.modules:>7} {self.tokens:>9,} {self.tokens / lines:>9.1f} "
            f"{' '.join(densities)}"
        )


def _docstring_lines(tree: ast.Module) -> set[int]:
    """The lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if first is not None and is_text and ast.get_docstring(node, clean=False) is not None:
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


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


def module_name(path: Path, package: str) -> str:
    parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def room_of(name: str, path: Path) -> str:
    """The room of a module: a package's folder, or the package itself."""
    package, *rest = name.split(".")
    if rest and (len(rest) > 1 or path.name == "__init__.py"):
        return f"{package}/{rest[0]}"
    return package


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


def total(paths: Iterable[Path]) -> Mass:
    """The counts of several modules."""
    return sum(map(Mass.of, paths), Mass())


def print_reach(sources: dict[str, Path]) -> None:
    """Run the main jobs under coverage, and print the share of statements that they reach, by room."""
    import coverage

    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "COVERAGE_FILE": f"{folder}/coverage",
            "DISPERSION_CACHE": folder,
        }
        packages = ",".join(PACKAGES)
        for job in JOBS:
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "coverage",
                    "run",
                    "--append",
                    f"--source={packages}",
                    "-m",
                    *job,
                ],
                cwd=folder,
                env=environment,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        data = coverage.Coverage(data_file=f"{folder}/coverage")
        data.load()
        statements: defaultdict[str, int] = defaultdict(int)
        missed: defaultdict[str, int] = defaultdict(int)
        for name, path in sources.items():
            _, all_of_them, _, not_run, _ = data.analysis2(str(path))
            room = room_of(name, path)
            statements[room] += len(all_of_them)
            missed[room] += len(not_run)
    print(f"\n{'reach of the main jobs':<34} {'statements':>12} {'executed':>9}")
    for room in sorted(statements):
        print(f"{room:<34} {statements[room]:>12,} {_share(statements[room], missed[room])}")
    whole = sum(statements.values())
    print(f"{'source':<34} {whole:>12,} {_share(whole, sum(missed.values()))}")


def _share(statements: int, missed: int) -> str:
    return f"{(statements - missed) / max(statements, 1):>9.0%}"


def main() -> int:
    sources: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        for path in tracked(str(folder.relative_to(ROOT))):
            sources[module_name(path, package)] = path
    graph = {name: imports(path, sources) - {name} for name, path in sources.items()}
    if "--circles" in sys.argv:
        around = circle(graph)
        if around:
            print(f"circle of imports: {' -> '.join(around)}", file=sys.stderr)
        return 1 if around else 0
    rooms: defaultdict[str, Mass] = defaultdict(Mass)
    for name, path in sources.items():
        rooms[room_of(name, path)] += Mass.of(path)
    heads = ("tokens", "a line", "packed", "compreh.", "condit.")
    print(f"{'room':<34} modules {' '.join(f'{head:>9}' for head in heads)}")
    for room, mass in sorted(rooms.items()):
        print(mass.row(room))
    print(sum(rooms.values(), Mass()).row("source"))
    for area in AREAS:
        print(total(tracked(area)).row(area))
    print(f"\n{'twelve anchors (range)':<52} {' '.join(f'{text:>9}' for text in ANCHOR_RANGES)}")
    for name, (tokens, per_line) in ANCHORS.items():
        print(f"{name:<42} {tokens:>9,} {per_line:>9.1f}")
    print("packed assignments, comprehensions, conditional expressions: per 1,000 lines of code")
    print(f"circle of imports: {' -> '.join(circle(graph)) or 'none'}")
    if "--reach" in sys.argv:
        print_reach(sources)
    return 0


if __name__ == "__main__":
    sys.exit(main())
