"""Part B of the evidence by the public commands, as `released.yaml` says; finished runs are kept.

    python benchmarks/validity/released.py --models FOLDER --text WIKI.test.txt --items ITEMS -o OUT

FOLDER holds a transformers folder for each model of the configuration; ITEMS is what `released_items.py`
wrote; datasets are looked for below it too, as the Hub is not asked unless HF_HUB_OFFLINE=0 says so. Each
run leaves a JSON with its commit, seconds of the clock and of the processor, and the report that
the command printed. A run that says `runs_code` (HumanEval) executes what the model writes, here.
"""

import argparse
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


def commands(name: str, run: dict, model: dict, args: argparse.Namespace, out: Path) -> list[list[str]]:
    """The commands of a run; the last one prints its report as JSON to `out/report.json`."""
    folder = str(args.models.resolve() / run["model"])
    if "tasks" not in run:
        arguments = [str(value) for value in run["arguments"]]
        study = [
            *arguments,
            "--dtype",
            model["dtype"],
            "--study",
            str(out / "study"),
            "-o",
            str(out / "report.json"),
        ]
        return [["dispersion", run["command"], folder, "--data", str(args.text.resolve()), *study]]
    dtype = run.get("dtype", model["dtype"])
    settings = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={folder},dtype={dtype}",
        "--device",
        args.device,
    ]
    settings += ["--tasks", ",".join(run["tasks"]), "--limit", str(run["limit"]), "--batch_size", "4"]
    if "shots" in run:
        settings += ["--num_fewshot", str(run["shots"])]
    if run.get("runs_code"):
        settings += ["--confirm_run_unsafe_code"]
    settings += [
        "--log_samples",
        "--output_path",
        str(out / "results"),
    ]
    store = str(out / "store")
    own = all((HERE / "tasks" / f"{task}.yaml").is_file() for task in run["tasks"])
    evaluation = ["lm_eval", "--include_path", str(HERE / "tasks")] if own else ["dispersion", "run"]
    metadata = ["--metadata", f"dispersion_store={store}"]
    if "correct" in run:
        metadata += [f"dispersion_correct={run['correct']}"]
    return [
        [*evaluation, *settings, *metadata],
        ["dispersion", "audit", store, "-o", str(out / "report.json")],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
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
        for words in commands(name, run, settings["models"][run["model"]], args, out):
            shown.append(" ".join(words))
            print(f"{name}: {shown[-1]}", file=sys.stderr, flush=True)
            module = {"lm_eval": "lm_eval", "dispersion": "lmeval_dispersion"}[words[0]]
            program = [sys.executable, "-m", module, *words[1:]]
            with (out / "log.txt").open("ab") as log:
                code = subprocess.run(
                    program, cwd=args.items.resolve(), env=environment | allowed, stdout=log, stderr=log
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
