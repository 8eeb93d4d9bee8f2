"""Pictures of every kind of page, made by the public commands and a headless Chromium.

    python scripts/page_screenshots.py --text wikitext-2-test.txt

writes ``build/pages/*.webp`` from the bundled demo models and runs and one text, and
prints what each page measures: its widest table, whether it scrolls sideways, what the console said and,
with ``--axe axe.min.js`` (npm package axe-core), the violations. Takes some minutes on two cores;
``--pages`` keeps the pages, so that a second call with that folder only takes the pictures. No test runs it.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser  # noqa: E402

DEMO = ROOT / "lmeval_dispersion" / "data" / "demo"
STEPS = {"100": "sums-00", "200": "sums-10", "300": "sums-20", "400": "sums-45", "500": "sums-80"}
TEXT = "wikitext-2-test.txt"
LOOK = f"--data {TEXT} --model_args dtype=float32 --device cpu"
LAW = f"{LOOK} --segment 64 --segments 1500 --bins 8 --bin-size 40 --layer all --contexts 8,16"
# The commands of each page, the last of which writes it; in a folder where prepare() has been.
PAGES = {
    "screen": ["screen-checkpoints sums-* -o screen.html"],
    "trajectory": ["screen-checkpoints run1 -o trajectory.html"],
    "accuracy": ["screen-checkpoints sums-* wrong-* --accuracy accuracy.csv -o accuracy.html"],
    "audit": ["dispersion audit --demo -o audit.html"],
    "predict": [
        'dispersion calibrate demo_runs/sums-30 --where "doc_id < 300" -o calibrator.json',
        "dispersion predict calibrator.json demo_runs/sums-30 --force -o predict.html",
    ],
    "compare": ["dispersion compare --demo -o compare.html"],
    "law": [f"dispersion inspect law sums-00 {LAW} --control untrained -o law.html"],
    "sublayers": [
        f"dispersion inspect sublayers sums-00 {LOOK} --segment 64 --sizes 10,20,50 -o sublayers.html"
    ],
    "condensation": [
        f"dispersion inspect condensation sums-00 sums-80 {LOOK} --segment 64 --segments 40 "
        "--control untrained -o condensation.html"
    ],
    "clusters": [
        f"dispersion inspect clusters sums-00 --data {TEXT} --model_args dtype=float32 "
        "--device cpu --ngram 2 --occurrences 20 --segment 10 --clusters 40 --layer all -o clusters.html"
    ],
}
# name: (width, height, colours, medium). Paper is A4 less Chromium's margins.
LOOKS = {
    "wide": (1280, 800, "light", "screen"),
    "phone": (390, 844, "light", "screen"),
    "dark": (1280, 800, "dark", "screen"),
    "print": (718, 1046, "light", "print"),
}
ALSO_SMALL_DARK_PRINTED = ("screen", "audit", "law")
MEASURE = """({
    sideways: document.documentElement.scrollWidth - innerWidth,
    table: Math.round(Math.max(0, ...[...document.querySelectorAll("table")].map(t => t.scrollWidth))),
    clipped: [...document.querySelectorAll("table, .chart svg, pre, p, dl")]
        .filter(part => part.checkVisibility() && part.getBoundingClientRect().right > innerWidth + 1)
        .map(part => part.tagName + " " + (part.dataset.name ?? part.textContent.slice(0, 40))),
})"""


def prepare(folder: Path, text: Path) -> None:
    """Put the demo models, a training run of five of them, the stores and the text into a folder."""
    for model in (entry for entry in DEMO.iterdir() if entry.is_dir()):
        (folder / model.name).symlink_to(model)
    (folder / "run1").mkdir()
    for step, model in STEPS.items():
        (folder / "run1" / f"checkpoint-{step}").symlink_to(DEMO / model)
    family = yaml.safe_load((DEMO / "family.yaml").read_text("utf-8"))
    rows = [f"{entry['folder']},{entry['accuracy']['mean']}" for entry in family["checkpoints"]]
    (folder / "accuracy.csv").write_text("\n".join(["repo,accuracy", *rows, ""]))
    (folder / "demo_runs").symlink_to(DEMO.parent / "demo_runs")
    shutil.copy(text, folder / TEXT)


def make(folder: Path, kind: str) -> None:
    """Run the commands of a page, unless it is there already."""
    if (folder / f"{kind}.html").exists():
        return
    commands = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    for line in PAGES[kind]:
        words = [
            word
            for given in shlex.split(line)
            for word in (sorted(path.name for path in folder.glob(given)) if "*" in given else [given])
        ]
        print(f"$ {line}", file=sys.stderr)
        done = subprocess.run([*words, "-q"], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        if done.returncode not in (0, 3):  # 3 is partly: predict refuses some slices
            raise SystemExit(f"{words[0]} ended with {done.returncode}")


def pictures(folder: Path, kind: str, out: Path, axe: str, every: bool) -> dict[str, object]:
    """Take a page's pictures; what was measured meanwhile."""
    measured: dict[str, object] = {"page": kind}
    for look, (width, height, scheme, medium) in LOOKS.items():
        with Browser() as browser:
            browser.size(width, height)
            browser.media(scheme, medium)
            browser.open(folder / f"{kind}.html")
            if medium == "print":
                browser.value("dispatchEvent(new Event('beforeprint'))")
            measured[look] = browser.value(MEASURE)
            if look == "wide" or every or kind in ALSO_SMALL_DARK_PRINTED:
                shot = browser.call("Page.captureScreenshot", format="webp", quality=80)
                (out / f"{kind}-{look}.webp").write_bytes(base64.b64decode(shot["data"]))
            if axe:
                browser.value(f"{axe}; 0")
                browser.value("document.querySelectorAll('details').forEach(part => { part.open = true; })")
                violations = browser.value("axe.run().then(result => result.violations)")
                nodes = [(rule["id"], node["html"]) for rule in violations for node in rule["nodes"]]
                measured[f"{look} violations"] = [f"{rule}: {html[:120]}" for rule, html in nodes]
            measured[f"{look} console"] = browser.console
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, help="plain text, such as WikiText-2's test part")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "pages", help="(default: %(default)s)")
    parser.add_argument("--pages", type=Path, help="folder to keep the pages in (default: a temporary one)")
    parser.add_argument("--axe", type=Path, help="axe.min.js of the npm package axe-core (default: not run)")
    parser.add_argument("--every", action="store_true", help="all looks of all pages, not only of three")
    parser.add_argument("kinds", nargs="*", default=list(PAGES), help=f"of {', '.join(PAGES)} (default: all)")
    args = parser.parse_args()
    folder = args.pages or Path(tempfile.mkdtemp()) / "models"  # its name is the title of the demo models
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / TEXT).exists():
        if args.text is None:
            parser.error("--text is needed for the pages of commands that read text")
        prepare(folder, args.text)
    args.out.mkdir(parents=True, exist_ok=True)
    axe = args.axe.read_text("utf-8") if args.axe else ""
    for kind in args.kinds:
        make(folder, kind)
        print(json.dumps(pictures(folder, kind, args.out, axe, args.every)), flush=True)


if __name__ == "__main__":
    main()
