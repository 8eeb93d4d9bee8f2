"""Train the population of siblings.yaml, play its races, and write its page.

python -m benchmarks.validity train   # goes on where it was stopped
python -m benchmarks.validity race    # siblings-races.json, of the committed answers
python -m benchmarks.validity page    # docs/results/siblings.md, of the committed results
python -m benchmarks.validity train --study benchmarks/validity/reference.yaml
python -m benchmarks.validity reference   # whether the second reference set orders no worse
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.validity import records
from benchmarks.validity.siblings import STUDY
from benchmarks.validity.study import read_study


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.validity", description=__doc__)
    parser.formatter_class = argparse.RawTextHelpFormatter
    parser.add_argument("job", choices=["train", "race", "page", "reference"])
    parser.add_argument(
        "--study", type=Path, default=STUDY, help="what train trains (default: siblings.yaml)"
    )
    parser.add_argument(
        "--work", type=Path, default=records.ROOT / "build" / "validity", help="folder for weights"
    )
    parser.add_argument("--results", type=Path, default=records.FOLDER, help="folder for results")
    parser.add_argument(
        "--jobs", type=int, default=1, help="models at once, one thread each (default: 1)"
    )
    parser.add_argument(
        "--page", type=Path, default=Path("docs/results/siblings.md"), help="the page"
    )
    arguments = parser.parse_args()
    if arguments.job == "train":
        from benchmarks.validity.training import train

        study = read_study(arguments.study)
        train(
            study,
            arguments.results / f"{study.name}.jsonl",
            arguments.work / study.name,
            arguments.jobs,
        )
    elif arguments.job == "race":
        import json

        from benchmarks.validity import siblings
        from benchmarks.validity.sibling_play import played

        study = read_study(STUDY)
        content = played(
            *siblings.cells(siblings.read(arguments.results), study.content["questions"])
        )
        (arguments.results / "siblings-races.json").write_text(
            json.dumps(content, indent=1), "utf-8"
        )
    elif arguments.job == "reference":
        from benchmarks.validity import reference_sets

        questions = read_study(reference_sets.STUDY).content["questions"]
        comparisons = reference_sets.compared(reference_sets.read(arguments.results), questions)
        print(reference_sets.table(comparisons))
    else:
        from benchmarks.validity.sibling_races import TITLE, sibling_page

        arguments.page.write_text(sibling_page(arguments.results).written(TITLE), "utf-8")


if __name__ == "__main__":
    main()
