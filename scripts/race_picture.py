"""Draw README's race: the first 11 of 32 fine-tunes, by the recorded answers of docs/results/siblings.md.

    python scripts/race_picture.py

writes docs/pictures/race.svg. The group is the study's first, its domain the first; the chart is that of
``dispersion race … -o race.html``, in the page's light colours on white.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.validity import siblings  # noqa: E402
from benchmarks.validity.sibling_races import SHORT  # noqa: E402
from benchmarks.validity.study import read_study  # noqa: E402
from lmeval_dispersion.racing.contest import Scores  # noqa: E402
from lmeval_dispersion.racing.lineup import Entry  # noqa: E402
from lmeval_dispersion.racing.replay import raced  # noqa: E402
from lmeval_dispersion.racing.report import race_of  # noqa: E402
from lmeval_dispersion.report import html_page  # noqa: E402
from lmeval_dispersion.report.charts import chart_svg  # noqa: E402


def main() -> None:
    rows = siblings.read(ROOT / "benchmarks" / "validity" / "results")
    found, _ = siblings.cells(rows, read_study(siblings.STUDY).content["questions"])
    cell = next(cell for cell in found if cell.kind == "tuned")
    lanes = cell.order[: siblings.first_for(cell.kind, len(cell.order))]
    ranks = {f"rank {rank}": rank for rank in range(1, len(lanes) + 1)}
    answers = {
        label: Scores(cell.right[i, :SHORT], cell.probability[i, :SHORT])
        for label, i in zip(ranks, lanes, strict=True)
    }
    names = [f"rank {rank}" for rank in range(1, len(cell.order) + 1)]
    entries = [
        Entry(name, {}, ranks.get(name), "rank" if name in ranks else None) for name in names
    ]
    race = race_of(raced(answers), entries, task=cell.domain, metric="accuracy")
    svg = chart_svg(race.charts()["race"], "race", "wide")
    style = (Path(html_page.__file__).with_name("page.css")).read_text("utf-8")
    light = dict(re.findall(r"(--[\w-]+): (#\w+)", style.split("@media")[0]))
    svg = re.sub(r"var\((--[\w-]+)\)", lambda used: light[used[1]], svg)
    white = '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>'
    (ROOT / "docs" / "pictures" / "race.svg").write_text(
        svg.replace(">", f">{white}", 1) + "\n", "utf-8"
    )
    print(race)


if __name__ == "__main__":
    main()
