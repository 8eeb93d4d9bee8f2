"""The stock `lm_eval` command: with the tasks enabled, killed, of two processes, of a script."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness_world import ARC, child, environment

from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import PartialStoreError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.store import read_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_world")]

TASK = "mmlu_stem_dispersion"
MODEL = data_folder("demo") / "sums-20"
LM_EVAL = [
    str(Path(sys.executable).parent / "lm_eval"),
    "--model",
    "hf",
    "--device",
    "cpu",
    "--tasks",
    TASK,
]
LM_EVAL += ["--model_args", f"pretrained={MODEL},dtype=float32", "--output_path"]


@pytest.fixture
def site(in_world, harness_copy):
    """A folder with an lm-eval in which the dispersion tasks are enabled."""
    assert main(["enable"]) == 0
    return str(harness_copy.parents[1])


def test_the_stock_command_runs_mmlu(site, tmp_path):
    # One category rather than all 57 subjects, for time; test_task_metrics.py runs the whole group.
    more = ("--log_samples", "--limit", "3", "--num_fewshot", "1", "--batch_size", "16")
    done = child(
        *LM_EVAL, tmp_path, *more, "--metadata", "dispersion_layers=last+layer.-1.attn", path=site
    )
    stores = next(tmp_path.glob("*/dispersion_*"))
    last = done.stderr.splitlines()[-2:]
    assert last == [f"vectors of 19 tasks: {stores}", f"next: dispersion audit {stores}"]
    results = json.loads(next(stores.parent.glob("results_*.json")).read_text())
    group = results["groups"][TASK]
    rows = [line for line in done.stdout.splitlines() if "|dispersion " in line]
    assert f"|{group['dispersion,none']:.4f}|±  |{group['dispersion_stderr,none']:.4f}|" in rows[-1]
    store = read_store(stores)
    assert store.manifest["identity"]["fewshot_seed"] == "1234"
    assert len(store.documents) == 19 * 3 == group["sample_len"]
    assert store.layers == ["last", "layer.2.attn"]
    assert store.model == str(MODEL)
    assert group["dispersion,none"] == pytest.approx(dispersion(store.vectors()), abs=2e-5)
    noted = results["configs"]["mmlu_anatomy_dispersion"]["metadata"]["dispersion"]
    assert Path(noted["store"]).is_dir()
    assert noted["layers"]["layer.2.attn"]["dispersion_n"] == 3
    samples = (
        next(stores.parent.glob("samples_mmlu_anatomy_dispersion_*.jsonl")).read_text().splitlines()
    )
    assert json.loads(samples[0])["dispersion"] == "<state of document 0>"
    assert max(map(len, samples)) < 8000


def test_a_killed_run_leaves_a_store_that_is_refused(site, tmp_path):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*LM_EVAL, str(tmp_path)], env=environment(site), **quiet)
    try:
        end = time.monotonic() + 120
        while not list(tmp_path.glob("*/dispersion_*/*/documents.parquet")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait(timeout=30)
    with pytest.raises(PartialStoreError, match="its run did not finish"):
        read_store(next(tmp_path.glob("*/dispersion_*")))


def test_the_stock_command_refuses_a_model_in_one_sentence(site, tmp_path):
    words = [LM_EVAL[0], "--model", "dummy", "--tasks", TASK, "--output_path", str(tmp_path)]
    done = subprocess.run(words, env=environment(site), capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("lm_eval: mmlu_")
    assert "needs hidden states, which DummyLM does not give; use the model hf, or" in done.stderr


TWO = """
import json, os, sys
import torch
from accelerate import Accelerator
from harness_world import evaluate, hflm
from lm_eval.tasks import TaskManager
from lmeval_dispersion.harness import install
import transformers

folder, out = sys.argv[1:]
accelerator = Accelerator(cpu=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
lm = hflm(transformers.AutoModelForCausalLM.from_pretrained(folder).float(), tokenizer, batch_size=3)
lm.accelerator, lm._rank, lm._world_size = accelerator, accelerator.process_index, accelerator.num_processes
assert lm.world_size == 2
manager = TaskManager(include_path=str(install.tasks_path()), include_defaults=False,
                      metadata={"dispersion_store": out + "/store"})
tasks = ["arc_easy_dispersion", "mmlu_astronomy_dispersion", "wikitext_dispersion", "ifeval_dispersion"]
results = evaluate(lm, tasks, manager, gen_kwargs={"max_gen_toks": 4}, limit=7)
if lm.rank == 0:
    open(out + "/results.json", "w").write(json.dumps(results["results"]))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)  # gloo's threads may abort an ordinary exit on a busy machine
"""


def test_two_processes_give_the_figures_of_one(world, model_folder, tmp_path):
    import nltk
    import transformers

    (tmp_path / "two.py").write_text(TWO)
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    launch += ["--standalone", "--nproc-per-node=2"]
    child(*launch, tmp_path / "two.py", model_folder, tmp_path, NLTK_DATA=str(nltk.data.path[0]))
    two = json.loads((tmp_path / "results.json").read_text())
    lm = world.lm(
        transformers.AutoModelForCausalLM.from_pretrained(model_folder).float(), batch_size=3
    )
    results = world.run(lm, *two, store=tmp_path / "one", gen_kwargs={"max_gen_toks": 4}, limit=7)
    for task, figures in results["results"].items():
        for key, value in figures.items():
            if isinstance(value, float) and not math.isnan(value):
                assert two[task][key] == pytest.approx(value, rel=1e-6), (task, key)
    first, second = read_store(tmp_path / "one"), read_store(tmp_path / "store")
    key = ["task", "doc_id"]
    a, b = (s.documents.sort_values(key).reset_index() for s in (first, second))
    assert a[[*key, "doc_hash", "prompt_hash"]].equals(b[[*key, "doc_hash", "prompt_hash"]])
    np.testing.assert_allclose(first.vectors()[a["index"]], second.vectors()[b["index"]], atol=2e-3)


def test_the_emitted_script_evaluates_what_has_no_results_and_can_be_verified(in_world, tmp_path):
    def run(*words):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return child(
            *words, cwd=tmp_path, PATH=path, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1"
        )

    screen = (sys.executable, "-m", "lmeval_screener")
    chosen = (
        "--demo",
        "--shortlist",
        "1",
        "--audit-sample",
        "1",
        "--emit",
        "list",
        "--domain",
        "math",
        "--tasks",
        ARC,
    )
    listed = run(*screen, *chosen).stdout.splitlines()
    assert len(listed) == 2
    # `datasets` takes "allenai/ai2_arc" for the folder of that name, where the script runs.
    shutil.copytree(in_world / "allenai/ai2_arc", tmp_path / "allenai/ai2_arc")
    run("bash", "list/run.sh", "--device", "cpu", "--limit", "4", "--batch_size", "4", "-q")
    files = (tmp_path / "list/race").rglob("results_*.json")
    results = {
        Path(r["config"]["model_args"]["pretrained"]).name: r
        for r in (json.loads(f.read_text()) for f in files)
    }
    assert results.keys() == {Path(name).name for name in listed}
    assert 0 <= results["sums-80"]["results"][ARC]["acc,none"] <= 1
    verdict = json.loads(run(*screen, "verify", "list/race", "--format", "json").stdout)
    assert verdict["answer"][0].startswith("Not enough results")
    assert [line["results"] for line in verdict["groups"]] == [2]
