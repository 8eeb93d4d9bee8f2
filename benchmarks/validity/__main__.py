"""Make the populations, their trials and their page.

    python -m benchmarks.validity train benchmarks/validity/mixtures.yaml
    python -m benchmarks.validity both benchmarks/validity/mixtures.yaml
    python -m benchmarks.validity trials benchmarks/validity/full.yaml
    python -m benchmarks.validity races benchmarks/validity/race.yaml
    python -m benchmarks.validity page

``train`` and ``trials`` go on where they were stopped; ``both`` screens what was trained, ``races`` races it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.validity import records
from benchmarks.validity.study import read_study


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.validity", description=__doc__)
    parser.formatter_class = argparse.RawTextHelpFormatter
    parser.add_argument("job", choices=["train", "trials", "both", "races", "page"])
    parser.add_argument("configuration", nargs="?", type=Path, help="a study's YAML file")
    parser.add_argument("--work", type=Path, help="folder for weights (default: build/validity/STUDY)")
    parser.add_argument("--results", type=Path, default=records.FOLDER, help="folder for results")
    parser.add_argument("--jobs", type=int, default=1, help="models at once, one thread each (default: 1)")
    parser.add_argument("--seeds", help="train these only, such as 20,21,22 (default: all)")
    parser.add_argument("--page", type=Path, default=Path("docs/results"), help="folder for the page")
    arguments = parser.parse_args()
    if arguments.job == "page":
        from benchmarks.validity.page import write_pages

        write_pages(arguments.results, arguments.page)
        return
    if arguments.configuration is None:
        parser.error(f"{arguments.job} needs a configuration, such as benchmarks/validity/mixtures.yaml")
    study = read_study(arguments.configuration)
    work = arguments.work or records.ROOT / "build" / "validity" / study.name
    file = arguments.results / f"{study.name}.jsonl"
    if arguments.job == "train":
        from benchmarks.validity.training import train

        seeds = {int(seed) for seed in arguments.seeds.split(",")} if arguments.seeds else None
        train(study, file, work, arguments.jobs, seeds)
    elif arguments.job == "trials":
        from benchmarks.validity.trials import run_trials

        run_trials(study, arguments.results / f"{study.name}-trials.jsonl", work)
    elif arguments.job == "races":
        from benchmarks.validity.race_claims import write_races

        write_races(arguments.results, work)
    else:
        from benchmarks.validity.both import counts

        rows = records.checked(file, study.path)
        kinds = {row["recipe"].split("-")[0] for row in rows} & set(study.content.get("mixtures", {}))
        by_kind = {
            kind: counts([row for row in rows if row["recipe"].startswith(kind)], work / "runs")
            for kind in sorted(kinds) or [""]
        }
        text = json.dumps(by_kind, indent=1) + "\n"
        (arguments.results / f"{study.name}-both.json").write_text(text, "utf-8")
        print(text)


if __name__ == "__main__":
    main()
