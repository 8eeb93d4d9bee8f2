"""Make the population, its trials and its page.

    python -m benchmarks.validity train benchmarks/validity/full.yaml --jobs 2
    python -m benchmarks.validity trials benchmarks/validity/full.yaml
    python -m benchmarks.validity page

``train`` and ``trials`` go on where they were stopped. Weights go below ``--work``, results to
``benchmarks/validity/results``; the page and its plots are made of the results alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.validity import results
from benchmarks.validity.study import read_study


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validity",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("job", choices=["train", "trials", "page"])
    parser.add_argument("configuration", nargs="?", type=Path, help="a study's YAML file")
    parser.add_argument("--work", type=Path, help="folder for weights (default: build/validity/STUDY)")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder for results")
    parser.add_argument("--jobs", type=int, default=1, help="models at once, one thread each (default: 1)")
    parser.add_argument(
        "--page", type=Path, default=results.ROOT / "docs" / "results", help="folder for the page"
    )
    arguments = parser.parse_args()
    if arguments.job == "page":
        from benchmarks.validity.page import write_pages

        write_pages(arguments.results, arguments.page)
        return
    if arguments.configuration is None:
        parser.error(f"{arguments.job} needs a configuration, such as benchmarks/validity/full.yaml")
    study = read_study(arguments.configuration)
    work = arguments.work or results.ROOT / "build" / "validity" / study.name
    if arguments.job == "train":
        from benchmarks.validity.training import train

        train(study, arguments.results / f"{study.name}.jsonl", work, arguments.jobs)
    else:
        from benchmarks.validity.trials import run_trials

        run_trials(study, arguments.results / f"{study.name}-trials.jsonl", work)


if __name__ == "__main__":
    main()
