"""The house: one public name for one thing, over both packages."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "lmeval_dispersion", ROOT / "screener/lmeval_screener")
# A command module declares its options in one and does its work in the other; `main` is a console script's.
# Both `ranked` put ranks on checkpoints: by answers, and by rows.
ALLOWED = {"add_arguments", "run", "main", "ranked"}


def doubled(folders):
    """Public functions and classes at the top of more than one module, with these modules."""
    places = defaultdict(list)
    for path in sorted(file for folder in folders for file in folder.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(folders[0].parent)))
    return {name: files for name, files in places.items() if len(files) > 1 and name not in ALLOWED}


def test_a_public_name_stands_for_one_thing_in_both_packages():
    assert doubled(PACKAGES) == {}


def test_a_second_thing_of_the_same_name_is_seen(tmp_path):
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("class Run: ...\ndef _own(): ...\ndef run(): ...\n")
    assert doubled((tmp_path,)) == {"Run": [f"{tmp_path.name}/one.py", f"{tmp_path.name}/two.py"]}
