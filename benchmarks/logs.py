"""The cost of reading lm-eval's logs: `dispersion compare` of two runs, by this tree and by another checkout.

    git worktree add /tmp/before COMMIT
    python benchmarks/logs.py --against /tmp/before --megabytes 300 --pairs 3

Each reads both runs in a process of its own, in pairs whose order alternates. Printed are the ratios of this
tree to the other, of CPU time (median over pairs, with their range) and of peak memory. Both must find the
same gained and lost documents.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.shared import in_a_child, parsed  # noqa: E402

DATE = "2026-01-26T15-03-11.465269"
CONTEXT = 3_600  # characters before a question: five examples, as in MMLU


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def line(i: int, shots: str, rng: random.Random) -> dict[str, Any]:
    """A document of four choices, as lm-eval 0.4.13 logs it."""
    doc = {
        "question": f"What is {i} plus {i}?",
        "subject": f"subject {i % 57}",
        "choices": list("ABCD"),
    }
    context = f"{shots}{doc['question']}\nAnswer:"
    gold = i % 4
    logs = [rng.uniform(-9, -0.1) for _ in range(4)]
    answers = [[str(log), "False"] for log in logs]
    return {
        "doc_id": i,
        "doc": doc,
        "target": str(gold),
        "arguments": {
            f"gen_args_{k}": {"arg_0": context, "arg_1": f" {'ABCD'[k]}"} for k in range(4)
        },
        "resps": [[answer] for answer in answers],
        "filtered_resps": answers,
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": sha(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": sha(context),
        "target_hash": sha(str(gold)),
        "acc": float(logs.index(max(logs)) == gold),
    }


def write(folder: Path, name: str, seed: int, size: int) -> Path:
    """A run of one task with ``size`` bytes of samples."""
    place = folder / name
    place.mkdir()
    rng = random.Random(seed)
    shots = "".join(random.Random(0).choices("abcdefghij klmnop.\n", k=CONTEXT))
    written = 0
    count = 0
    with (place / f"samples_choices_{DATE}.jsonl").open("w", encoding="utf-8") as file:
        while written < size:
            written += file.write(json.dumps(line(count, shots, rng), ensure_ascii=False) + "\n")
            count += 1
    config = {"task": "choices", "output_type": "multiple_choice", "doc_to_text": "{{question}}"}
    results = {
        "results": {"choices": {"alias": "choices"}},
        "configs": {"choices": config},
        "n-samples": {"choices": {"original": count, "effective": count}},
        "versions": {"choices": 1.0},
        "config": {"model_args": f"pretrained={name}"},
        "model_name": name,
    }
    (place / f"results_{DATE}.json").write_text(json.dumps(results))
    return place


def child(first: str, second: str) -> None:
    from lmeval_dispersion import compare

    whole = compare([first, second]).others[0].slices[0]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {"cpu": usage.ru_utime + usage.ru_stime, "memory": usage.ru_maxrss}
    print(json.dumps({**found, "gained": whole.gained, "lost": whole.lost}))


def main() -> None:
    arguments = parsed(
        __doc__,
        ("--against", {"type": Path, "required": True, "help": "another checkout"}),
        (
            "--megabytes",
            {"type": int, "default": 300, "help": "of each run (default: %(default)s)"},
        ),
        ("--pairs", {"type": int, "default": 3, "help": "default: %(default)s"}),
    )
    trees = [ROOT, arguments.against.resolve()]
    with tempfile.TemporaryDirectory() as folder:
        size = arguments.megabytes * 1_000_000
        runs = [
            write(Path(folder), name, seed, size) for seed, name in enumerate(("base", "tuned"))
        ]
        cpu = []
        memory = []
        for pair in range(arguments.pairs):
            found = {}
            for tree in trees if pair % 2 == 0 else reversed(trees):
                path = os.pathsep.join([str(tree), str(tree / "screener")])
                found[tree] = in_a_child(
                    sys.executable, __file__, "--child", *runs, PYTHONPATH=path
                )
            ours, theirs = (found[tree] for tree in trees)
            if (ours["gained"], ours["lost"]) != (theirs["gained"], theirs["lost"]):
                raise SystemExit(f"the trees differ: {ours} and {theirs}")
            cpu.append(ours["cpu"] / theirs["cpu"])
            memory.append(ours["memory"] / theirs["memory"])
    print(f"CPU {statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})")
    print(f"peak memory {statistics.median(memory):.2f} ({min(memory):.2f} to {max(memory):.2f})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.path.remove(str(ROOT))
        child(*sys.argv[2:])
    else:
        main()
