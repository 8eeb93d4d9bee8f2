"""The results of part B as JSON, and the page that is made of it.

    python benchmarks/validity/released_page.py collect OUT MODELS TEXTS
    python benchmarks/validity/released_page.py page

``collect`` brings the runs of released.py that lie in OUT into docs/results/released.json, in the order of
the configuration; runs that do not lie there stay as they are. ``page`` makes released.md of that file.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import yaml

HERE = Path(__file__).resolve().parent
HOME = "https://github.com/lmeval-dispersion/lmeval-dispersion/blob/main"
RESULTS = HERE.parent.parent / "docs" / "results"
JSON, PAGE = RESULTS / "released.json", RESULTS / "released.md"
TITLES = (
    "Perplexity law:",
    "Condensation:",
    "Choice of sub-layer:",
    "Dispersion audit:",
    "What labels are worth:",
    "Training with a dispersion loss,",
)


def answer(*words: str, cwd: Path) -> str:
    """The first sentences of a report, or why there is none; what is complete is not computed again."""
    program = [sys.executable, "-m", "lmeval_dispersion", *words, "--quiet"]
    done = subprocess.run(program, cwd=cwd, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    end = next((i for i, line in enumerate(lines) if line.startswith(TITLES)), 0)
    refused = done.stderr.splitlines()
    if not end and len(refused) == 1 and refused[0].startswith(f"dispersion {words[0]}: "):
        return f"No report: {refused[0].partition(': ')[2]}."
    if not end:
        raise SystemExit(f"{' '.join(words)}: {done.stderr or 'no answer'}")
    return " ".join(lines[:end])


def share_right(values: dict, run: dict) -> float:
    """A task's accuracy by the metric, and the filter where one is named, that the run goes by."""
    chosen, _, metric = run.get("correct", "pass@1").rpartition("/")
    keys = [
        key
        for key in values
        if key.partition(",")[0] == metric and key.endswith(f",{chosen}" if chosen else "")
    ]
    return values[keys[0]]


def accuracies(folder: Path, tasks: list[str]) -> dict[str, float]:
    """Share of right answers over the tasks, in per cent, by the folders of results below ``folder``."""
    found = {}
    for place in sorted(folder.iterdir()):
        results = json.loads(sorted(place.rglob("results_*.json"))[-1].read_text("utf-8"))
        counts = [results["n-samples"][task]["effective"] for task in tasks]
        shares = [results["results"][task]["acc_norm,none"] for task in tasks]
        right = sum(share * count for share, count in zip(shares, counts, strict=True))
        found[place.name] = 100 * right / sum(counts)
    return found


def trained_arms(folder: Path, tasks: list[str]) -> list[dict]:
    """One row an arm: perplexity by domain against base, token dispersion, right answers against base."""
    right = accuracies(folder / "results", tasks)
    rows: dict[str, dict] = {}
    for row in json.loads((folder / "report.json").read_text("utf-8"))["trained"]:
        arm = row["loss"]
        shares = {
            name.rpartition("-seed")[2]: v for name, v in right.items() if name.startswith(arm + "-seed")
        }
        differences = [share - right[f"base-seed{seed}"] for seed, share in shares.items()]
        kept = rows.setdefault(
            arm,
            {
                "arm": arm,
                "perplexity": {},
                "tokens_before": row["tokens_before"],
                "tokens": row["tokens"],
                "right": fmean(shares.values()),
                "right_versus_base": differences,
            },
        )
        kept["perplexity"][Path(row["domain"]).name] = {
            key: row[key] for key in ("before", "perplexity", "versus_base", "versus_base_sd")
        }
    return [{"start": right["start"]}, *rows.values()]


def collect(out: Path, models: Path, texts: Path) -> None:
    """Bring finished runs into the JSON."""
    settings = yaml.safe_load((HERE / "released.yaml").read_text("utf-8"))
    before = {run["name"]: run for run in json.loads(JSON.read_text("utf-8"))["runs"]}
    found = []
    for name, run in settings["runs"].items():
        if not (out / name / "result.json").is_file():
            found.append(before[name])
            continue
        result = json.loads((out / name / "result.json").read_text("utf-8"))
        kept = {key: result[key] for key in ("name", "about", "commit", "machine", "seconds", "cpu_seconds")}
        if run.get("command") == "train":
            arguments = [str(value) for value in run["arguments"]]
            again = ["--model", str(models / run["model"]), *arguments, "--out", str(out / name / "study")]
            kept["answers"] = [answer("train", *again, cwd=texts)]
            kept["arms"] = trained_arms(out / name, run["accuracy"]["tasks"])
            kept["command"] = f"dispersion train --model MODEL {' '.join(arguments)}"
        elif "command" in run:
            arguments = [str(value) for value in run["arguments"]]
            study = ["--dtype", "float32", "--study", str(out / name / "study")]
            kept["answers"] = [
                answer(
                    run["command"],
                    str(models / run["model"]),
                    "--data",
                    "wiki.test.txt",
                    *arguments,
                    *study,
                    cwd=texts,
                )
            ]
            kept["command"] = f"dispersion {run['command']} MODEL --data TEXT {' '.join(arguments)}"
        else:
            store = str(out / name / "store")
            kept["answers"] = [
                answer(job, store, cwd=models) for job in run.get("reports", ["audit", "budget"])
            ]
            shots = f" --num_fewshot {run['shots']}" if "shots" in run else ""
            own = all((HERE / "tasks" / f"{task}.yaml").is_file() for task in run["tasks"])
            program = "lm_eval" if own else "dispersion run"
            kept["command"] = f"{program} --tasks {','.join(run['tasks'])} --limit {run['limit']}{shots}"
            files = sorted((out / name / "results").rglob("results_*.json"))
            tasks = json.loads(files[-1].read_text("utf-8"))["results"]
            shown = {task: tasks[task] for task in run["tasks"]}
            kept["accuracy"] = {task: share_right(values, run) for task, values in shown.items()}
            kept["guessing"] = run.get("correct", "").startswith("acc")  # four choices; else it is generated
        found.append(kept)
    JSON.write_text(json.dumps({"claims": settings["claims"], "runs": found}, indent=1) + "\n", "utf-8")


def page() -> str:
    """The page, from the JSON."""
    content = json.loads(JSON.read_text("utf-8"))
    lines = [
        "# Two released models, end to end",
        "",
        "What the tools say of real models, in their own words: each answer is the first sentences of a",
        f"report. The [configuration]({HOME}/benchmarks/validity/released.yaml) was committed before the",
        "first run, with what would refute each claim. Two shared CPU cores allow these sizes only, so *not",
        "told apart* also means *too little was measured*. This page is made from",
        "[released.json](released.json) by `benchmarks/validity/released_page.py page`; a test holds it to",
        "that.",
        "",
        "| claim | what would refute it |",
        "|---|---|",
    ]
    lines += [f"| {name} | {text} |" for name, text in content["claims"].items()]
    for run in content["runs"]:
        lines += ["", f"## {run['name']}: {run['about']}", "", "```console", f"$ {run['command']}", "```", ""]
        if "accuracy" in run:
            shares = ", ".join(f"{task} {100 * value:.1f} %" for task, value in run["accuracy"].items())
            lines += [f"Accuracy{' (guessing: 25 %)' if run['guessing'] else ''}: {shares}.", ""]
        for text in run["answers"]:
            lines += [f"> {text}", ""]
        if "arms" in run:
            lines += [*_arms(run["arms"]), ""]
        lines += [_made(run)]
    return "\n".join(lines) + "\n"


def _arms(rows: list[dict]) -> list[str]:
    start, *arms = rows
    domains = list(arms[0]["perplexity"])
    titles = [f"perplexity against base, %: {re.split('[.-]', name)[0]}" for name in domains]
    lines = [
        "Mean (standard deviation) over seeds, each against the base with the same seed. Before training "
        f"{start['start']:.1f} % of the questions are right, and the token dispersion of the last layer is "
        f"{arms[0]['tokens_before']:.3f}.",
        "",
        f"| arm | {' | '.join(titles)} | token dispersion | questions right, % | against base, points |",
        f"|---|{'---:|' * (len(domains) + 3)}",
    ]
    for row in arms:
        cells = []
        for name in domains:
            figures = row["perplexity"][name]
            moved = figures["versus_base"]
            cells.append("" if moved is None else f"{moved:+.2f} ({figures['versus_base_sd']:.2f})")
        points = row["right_versus_base"]
        against = "" if row["arm"] == "base" else f"{fmean(points):+.1f} ({stdev(points):.1f})"
        cells = [row["arm"], *cells, format(row["tokens"], ".3f"), format(row["right"], ".1f"), against]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _made(run: dict) -> str:
    cost = f"{run['cpu_seconds']} CPU seconds" if run["cpu_seconds"] else f"{run['seconds']} seconds, busy"
    return f"Commit {run['commit']}, {run['machine']}, {cost}."


def main() -> None:
    if sys.argv[1:2] == ["page"]:
        PAGE.write_text(page(), "utf-8")
    elif sys.argv[1:2] == ["collect"] and len(sys.argv) == 5:
        collect(*(Path(word).resolve() for word in sys.argv[2:]))
        PAGE.write_text(page(), "utf-8")
    else:
        raise SystemExit("usage: released_page.py collect OUT MODELS TEXTS | page")


if __name__ == "__main__":
    main()
