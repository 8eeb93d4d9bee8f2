"""lm-eval with its own defaults, the installed one and 0.5: the same documents, vectors and metrics.

Tests of 0.5 are skipped unless ``LM_EVAL_NEXT`` names a folder that holds it: a snapshot of
lm-evaluation-harness' branch ``next0.5`` (tried with 0.5.0.dev2 of 2026-05-11). ``.ci/run`` sets it.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from harness_world import ARC, COMMAND, LM_EVAL, NEXT, check_stored_run, child

from lmeval_dispersion.auditing.compare import compare
from lmeval_dispersion.store import read_store
from lmeval_dispersion.store.samples import read_logged

pytestmark = pytest.mark.skipif(not NEXT, reason="LM_EVAL_NEXT names no folder with lm-eval 0.5")

RUN = """
import json, sys
import transformers
from harness_world import evaluate, hflm
from lm_eval.tasks import TaskManager
from lmeval_dispersion.harness import install
folder, out = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
manager = TaskManager(include_path=str(install.tasks_path()), include_defaults=False,
                      metadata={"dispersion_store": out + "/store", "dispersion_layers": "last+layer.0.attn"})
figures = {}
for tasks, options in (
    # 0.5.0.dev2 cannot log samples of a selection, the stock task's neither
    (["arc_easy_dispersion"], {"samples": {"arc_easy_dispersion": [1, 4, 6]}, "log_samples": False}),
    (["mmlu_stem_dispersion", "truthfulqa_mc1_dispersion"], {"limit": 3}),
    (["gsm8k_dispersion"], {"limit": 4, "gen_kwargs": {"max_gen_toks": 4}, "num_fewshot": 1}),
    (["wikitext_dispersion"], {}),
):
    results = evaluate(hflm(model, tokenizer, batch_size=3, max_length=512), tasks, manager, **options)
    for whole, metrics in results["results"].items():
        name = whole.split("::")[-1]  # 0.5 puts a group's name before its tasks'
        keys = [k for k in metrics if k.startswith("dispersion")]
        figures[name] = {key: metrics[key] for key in keys}
        config = results["configs"].get(whole)
        if config:
            figures[name]["summary"] = dict(config["metadata"]["dispersion"], store=None)
task = "truthfulqa_mc1_dispersion"
predicted = evaluate(hflm(model, tokenizer), [task], manager, limit=2, predict_only=True)
assert not any("dispersion" in key for key in predicted["results"][task])
import lm_eval
open(out + "/figures.json", "w").write(json.dumps({"lm_eval": lm_eval.__file__, "figures": figures}))
"""


@pytest.mark.slow
def test_the_next_lm_eval_gives_the_same_stores_and_metrics(in_world, model_folder, tmp_path):
    def run(name, path):
        (tmp_path / name).mkdir()
        words = (sys.executable, "-W", "ignore", "-c", RUN, model_folder, tmp_path / name)
        child(*words, path=path, cwd=in_world)
        answer = json.loads((tmp_path / name / "figures.json").read_text())
        return answer

    now, later = run("now", ""), run("later", NEXT)
    assert later["lm_eval"].startswith(NEXT)
    assert not now["lm_eval"].startswith(NEXT)
    assert set(now["figures"]) == set(later["figures"])
    for task, metrics in now["figures"].items():
        assert json.dumps(later["figures"][task], sort_keys=True) == json.dumps(
            metrics, sort_keys=True
        ), task
    for folder in sorted((tmp_path / "now/store").iterdir()):
        first, second = read_store(folder), read_store(tmp_path / "later/store" / folder.name)
        # 0.5 hashes the prompt of a rolling task otherwise.
        drop = ["prompt_hash"] if folder.name.startswith("wikitext") else []
        assert first.documents.drop(columns=drop).equals(second.documents.drop(columns=drop)), (
            folder.name
        )
        for layer in first.layers:
            np.testing.assert_array_equal(first.vectors(layer), second.vectors(layer))


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="bootstrap-in-processes", marks=pytest.mark.slow),
        pytest.param({"LMEVAL_DISABLE_MULTIPROC": "1"}, id="bootstrap-in-one-process"),
    ],
)
def test_the_command_with_default_options_stores_the_run(
    variables, in_world, model_folder, tmp_path
):
    """As `test_run_command.py` has it of the installed lm-eval."""
    model = (
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model_folder},dtype=float32",
        "--device",
        "cpu",
    )
    more = (
        "--output_path",
        tmp_path / "out",
        "--metadata",
        '{"dispersion_layers": "last+layer.0"}',
    )
    command = (sys.executable, "-W", "ignore", "-c", COMMAND, "run", *model, "--tasks", ARC)
    done = child(*command, *more, path=NEXT, cwd=in_world, **variables)
    assert "ootstrapping" not in done.stdout + done.stderr
    check_stored_run(tmp_path / "out", ARC)


def test_plain_samples_of_both_are_one_run(in_world, model_folder, stock, tmp_path):
    """Kinds of tasks and a group, the later ones by the stock command; read without vectors, and compared."""
    names, families = (
        ("arc_easy", "mmlu_stem", "gsm8k", "wikitext"),
        ("arc", "mmlu", "gsm8k", "wikitext"),
    )
    now, _ = stock(*names, families=families, gen_kwargs={"max_gen_toks": 8}, limit=5)
    for family in ("arc", "mmlu/default", "gsm8k", "wikitext"):
        shutil.copytree(Path(NEXT, "lm_eval", "tasks", family), tmp_path / "tasks" / family)
    command = (sys.executable, "-W", "ignore", "-c", LM_EVAL, "--model", "hf", "--device", "cpu")
    model = (
        "--model_args",
        f"pretrained={model_folder},dtype=float32,max_length=512",
        "--num_fewshot",
        "0",
    )
    tasks = ("--tasks", ",".join(names), "--include_path", tmp_path / "tasks", "--limit", "5")
    more = ("--log_samples", "--gen_kwargs", "max_gen_toks=8", "--output_path", tmp_path / "later")
    child(*command, *model, *tasks, *more, path=NEXT, cwd=in_world, LMEVAL_DISABLE_MULTIPROC="1")
    documents = [read_logged(place).documents for place in (now, tmp_path / "later")]
    np.testing.assert_array_equal(*(frame[["task", "doc_id", "subject"]] for frame in documents))
    found = compare([now, tmp_path / "later"])
    # Both log a text to score whole, wikitext's, as another prompt: it has no score of a document either.
    texts = int((documents[0]["task"] == "wikitext").sum())
    assert (found.documents, found.left_out) == (len(documents[0]) - texts, [texts, texts])
    assert (found.others[0].slices[0].gained, found.others[0].slices[0].lost) == (0, 0)
