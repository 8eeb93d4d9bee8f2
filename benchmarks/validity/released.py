"""Part B of the evidence by the public commands, as `released.yaml` says; finished runs are kept.

    python benchmarks/validity/released.py --models FOLDER --texts TEXTS --items ITEMS -o OUT

FOLDER holds a transformers folder for each model of the configuration. TEXTS holds WikiText-2 as
wiki.valid.txt and wiki.test.txt, and the Python of `scripts/small_gpt2.py`. ITEMS is what `released_items.py`
wrote; datasets are looked for below it too, as the Hub is not asked unless HF_HUB_OFFLINE=0 says so. Each
run leaves a JSON with its commit, seconds of the clock and of the processor, and the report that
the command printed. A run that says `runs_code` (HumanEval) executes what the model writes, here.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return done.stdout.strip()


Command = tuple[list[str], Path]  # the words, and the folder that they are run in


def commands(name: str, run: dict, model: dict, args: argparse.Namespace, out: Path) -> list[Command]:
    """The commands of a run; one of them writes its report as JSON to `out/report.json`."""
    folder = str(args.models.resolve() / run["model"])
    if "tasks" not in run:
        arguments = [str(value) for value in run["arguments"]]
        written = ["-o", str(out / "report.json")]
        if run["command"] == "train":
            words = ["dispersion", "train", "--model", folder, *todays_flags(arguments)]
            train = [*words, "--output-dir", str(out / "study"), *written]
            return [(train, args.texts.resolve()), *trained_accuracies(run, folder, args, out)]
        study = ["--dtype", model["dtype"], "--study", str(out / "study"), *written]
        words = [
            "dispersion",
            "inspect",
            run["command"],
            folder,
            "--data",
            "wiki.test.txt",
            *arguments,
            *study,
        ]
        return [(words, args.texts.resolve())]
    settings = evaluation(folder, run.get("dtype", model["dtype"]), run["tasks"], run["limit"], args)
    settings += ["--batch_size", str(run.get("batch", 4))]
    if "shots" in run:
        settings += ["--num_fewshot", str(run["shots"])]
    if run.get("runs_code"):
        settings += ["--confirm_run_unsafe_code"]
    settings += ["--log_samples", "--output_path", str(out / "results")]
    store = str(out / "store")
    own = all((HERE / "tasks" / f"{task}.yaml").is_file() for task in run["tasks"])
    program = ["lm_eval", "--include_path", str(HERE / "tasks")] if own else ["dispersion", "run"]
    metadata = ["--metadata", f"dispersion_store={store}"]
    if "correct" in run:
        metadata += [f"dispersion_correct={run['correct']}"]
    audit = ["dispersion", "audit", store, "-o", str(out / "report.json")]
    return [([*program, *settings, *metadata], args.items.resolve()), (audit, args.items.resolve())]


def todays_flags(arguments: list[str]) -> list[str]:
    """Flags of `dispersion train` for those of the configuration, which stays as it was before it ran."""
    names = {"--second-data": "--data", "--second-eval-data": "--eval-data", "--batch": "--batch-size"}
    words = [names.get(word, word) for word in arguments]
    at, evals = words.index("--arms"), words.index("--evals")
    losses = [word for arm in words[at + 1].split(",") if arm != "base" for word in ("--loss", arm)]
    return [*words[:at], *losses, *words[at + 2 : evals], *words[evals + 2 :]]


def evaluation(folder: str, dtype: str, tasks: list[str], limit: int, args: argparse.Namespace) -> list[str]:
    words = ["--model", "hf", "--model_args", f"pretrained={folder},dtype={dtype}", "--device", args.device]
    return [*words, "--tasks", ",".join(tasks), "--limit", str(limit)]


def trained_accuracies(run: dict, start: str, args: argparse.Namespace, out: Path) -> list[Command]:
    """Stock lm-eval for the start and for every trained arm; results lie in a folder of its name."""
    words = [str(value) for value in run["arguments"]]
    arms = words[words.index("--arms") + 1].split(",")
    seeds = [value for word, value in itertools.pairwise(words) if word == "--seed"]
    names = [f"{arm}-seed{seed}" for arm in arms for seed in seeds]
    models = {"start": start} | {name: str(out / "study" / name / "model") for name in names}
    asked = run["accuracy"]
    program = ["lm_eval", "--include_path", str(HERE / "tasks"), "--batch_size", "8", "--output_path"]
    evaluations = []
    for name, folder in models.items():
        settings = evaluation(folder, asked["dtype"], asked["tasks"], asked["limit"], args)
        evaluations.append(([*program, str(out / "results" / name), *settings], args.items.resolve()))
    return evaluations


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--items", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("names", nargs="*", help="runs (default: all)")
    args = parser.parse_args()
    settings = yaml.safe_load((HERE / "released.yaml").read_text("utf-8"))
    environment = {"HF_HUB_OFFLINE": "1"} | os.environ
    environment |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    failed = 0
    for name in args.names or settings["runs"]:
        run = settings["runs"][name]
        out = (args.output / name).resolve()
        if (out / "result.json").is_file():
            continue
        out.mkdir(parents=True, exist_ok=True)
        shown, start = [], time.time()
        allowed = {"HF_ALLOW_CODE_EVAL": "1"} if run.get("runs_code") else {}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for words, place in commands(name, run, settings["models"][run["model"]], args, out):
            shown.append(" ".join(words))
            print(f"{name}: {shown[-1]}", file=sys.stderr, flush=True)
            module = {"lm_eval": "lm_eval", "dispersion": "lmeval_dispersion"}[words[0]]
            program = [sys.executable, "-m", module, *words[1:]]
            with (out / "log.txt").open("ab") as log:
                code = subprocess.run(
                    program, cwd=place, env=environment | allowed, stdout=log, stderr=log
                ).returncode
            if code not in (0, 3):  # 3: partly done, which the report says
                print(f"{name}: exit code {code}; see {out / 'log.txt'}", file=sys.stderr)
                failed = 1
                break
        else:
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            result = {
                "name": name,
                "about": settings["models"][run["model"]]["about"],
                "settings": run,
                "commit": commit(),
                "machine": "2 shared x86-64 cores",
                "seconds": round(time.time() - start),
                "cpu_seconds": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime),
                "report": json.loads((out / "report.json").read_text("utf-8")),
            }
            (out / "result.json").write_text(json.dumps(result, indent=1), "utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
