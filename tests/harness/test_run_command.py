"""``dispersion run`` in this process: users' own tasks, second runs, and failures in a sentence."""

import json
import logging
import random
import shutil
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import transformers
from harness_world import ARC, ROOT, check_stored_run
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file, save_file

from lmeval_dispersion import open_store
from lmeval_dispersion.cli import main
from lmeval_dispersion.harness import saving
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.usefixtures("in_world")


@pytest.fixture(autouse=True)
def _quick_command(monkeypatch, tmp_path):
    """lm-eval reads all of its 10,000 task files before a run: here it has none of its own."""
    import lm_eval.tasks.manager as manager
    from lm_eval.utils import setup_logging

    (tmp_path / "no-tasks").mkdir()
    monkeypatch.setattr(manager, "__file__", str(tmp_path / "no-tasks/manager.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    setup_logging()  # its handler keeps the stderr of its first use: here, before a test captures that
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level
    yield
    saving.written.clear()
    saving.remarks.clear()
    logger.handlers[:], logger.level = before


def run(model, tasks, *more, **metadata):
    arguments = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model},dtype=float32",
        "--device",
        "cpu",
    ]
    given = json.dumps({f"dispersion_{key}": str(value) for key, value in metadata.items()})
    return main(["run", *arguments, "--tasks", tasks, "--metadata", given, *map(str, more)])


def test_the_command_with_default_options_stores_the_run(model_folder, tmp_path, capsys):
    assert run(model_folder, ARC, "--output_path", tmp_path / "out", layers="last+layer.0") == 0
    said = capsys.readouterr()
    assert "ootstrapping" not in said.out + said.err
    check_stored_run(tmp_path / "out", ARC)


def test_weights_that_the_files_lack_are_a_warning(model_folder, tmp_path, capsys):
    half = shutil.copytree(model_folder, tmp_path / "half")
    tensors = load_file(half / "model.safetensors")
    there = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    save_file(there, half / "model.safetensors", {"format": "pt"})
    assert run(half, ARC, "--limit", 2, store=tmp_path / "store") == 0
    warning = f"warning: {half}: {len(tensors) - len(there)} of its {len(tensors)} tensors are not in its files"
    assert warning in capsys.readouterr().err


def test_what_concerns_many_tasks_is_one_warning(model_folder, tmp_path, capsys):
    tasks = [
        f"{name}_dispersion"
        for name in ("arc_challenge", "arc_easy", "hellaswag", "truthfulqa_mc1")
    ]
    assert run(model_folder, ",".join(tasks), "--limit", 1, store=tmp_path / "store") == 0
    printed = capsys.readouterr()
    assert "is NaN" not in printed.err
    # Three figures of each of four tasks, of one document: one line in place of twelve rows.
    assert "12 rows are not shown: they are NaN" in printed.out
    assert "nan" not in printed.out
    assert printed.out.count("|acc ") == 4
    saving.report_at_exit()
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "dispersion is NaN" in line] == [
        f"warning: 4 tasks ({', '.join(tasks[:3])}, …): dispersion is NaN (fewer than two documents)"
    ]
    assert said[-1] == f"next: dispersion audit {tmp_path / 'store'}"


def refused_models(model_folder, place):
    """Options of models that cannot run our tasks, and how each is refused."""
    plain, t5 = place / "plain", place / "t5"
    shutil.copytree(model_folder, plain)
    (plain / "chat_template.jinja").unlink()
    shutil.copytree(model_folder, t5)
    transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2).save_pretrained(t5)
    hf = ["--model", "hf", "--model_args"]
    api = "model=x,tokenizer_backend=None,base_url=http://localhost:1"
    return {
        "template": (
            [*hf, f"pretrained={plain}", "--apply_chat_template"],
            "; leave apply_chat_template out",
        ),
        "t5": (
            [*hf, f"pretrained={t5}"],
            "needs a decoder-only model, got an encoder-decoder; choose another model, or run",
        ),
        "dummy": (
            ["--model", "dummy"],
            "which DummyLM does not give; use the model hf, or run the stock task",
        ),
        "api": (
            ["--model", "local-completions", "--model_args", api],
            "API does not give; use the model hf, or",
        ),
        "vllm": (
            ["--model", "vllm", "--model_args", f"pretrained={plain}"],
            "which vllm does not give; use the model hf, or run the stock task with log_samples and then "
            "`dispersion embed MODEL --from-samples RESULTS`",
        ),
        "unknown": (["--model", "hff"], "Attempted to load model 'hff'"),
    }


@pytest.mark.parametrize(
    "which",
    [
        *("template", "t5", "dummy", "api", "unknown"),
        pytest.param(
            "vllm", marks=pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is here")
        ),
    ],
)
def test_a_model_that_cannot_run_our_tasks_is_refused_in_a_sentence_before_its_weights_are_loaded(
    which, model_folder, tmp_path, capsys, monkeypatch
):
    def loaded(*_, **__):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(HFLM, "_create_model", loaded)
    options, sentence = refused_models(model_folder, tmp_path)[which]
    assert main(["run", *options, "--device", "cpu", "--tasks", ARC]) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert sentence in said.strip().splitlines()[-1]
    assert HFLM._create_model is loaded
    assert HFLM._create_tokenizer.__module__ == "lm_eval.models.huggingface"  # all is put back


SUMS = """
task: sums
class: !function lmeval_dispersion.harness.DispersionTask
dataset_path: json
dataset_kwargs: {data_files: {test: SUMS.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
"""


def write_sums(folder):
    """A task of 150 sums for the demo's models."""
    draw = random.Random(0)
    lines = []
    for _ in range(150):
        a, b = draw.randrange(50), draw.randrange(50)
        choices = [a + b, *draw.sample([n for n in range(99) if n != a + b], 3)]
        draw.shuffle(choices)
        line = {
            "question": f"12+30=42. 40-2=38. 7+5=12. {a}+{b}=",
            "choices": [f"{n}." for n in choices],
        }
        lines.append(json.dumps({**line, "answer": choices.index(a + b)}) + "\n")
    folder.mkdir()
    (folder / "sums.jsonl").write_text("".join(lines))
    (folder / "sums.yaml").write_text(SUMS.replace("SUMS.jsonl", str(folder / "sums.jsonl")))


def test_the_page_on_hidden_states_does_what_it_says_on_the_store_of_a_users_own_task(
    tmp_path, monkeypatch, capsys
):
    write_sums(tmp_path / "tasks")
    more, model = (
        ("--include_path", tmp_path / "tasks", "--batch_size", 32),
        data_folder("demo") / "sums-10",
    )
    metadata = {"layers": "last+layer.-2", "store": tmp_path / "runs"}
    assert run(model, f"sums,{ARC}", *more, **metadata) == 0
    assert len(read_store(tmp_path / "runs").documents) == 150 + 8
    capsys.readouterr()
    assert run(model, "sums", *more, **metadata) == 2
    again = capsys.readouterr().err.strip().splitlines()[-1]
    assert again.startswith(
        f"dispersion run: {tmp_path / 'runs/sums'} already holds a finished store; "
    )

    store = open_store((tmp_path / "runs/sums").rename(tmp_path / "states"))
    assert repr(store).endswith("sums-10: 150 documents, layers: last, layer.1>")
    np.testing.assert_array_equal(store.vectors("layer.-2"), store.vectors("layer.1"))
    lengths = np.linalg.norm(store.to_numpy("layer.-2"), axis=1)
    np.testing.assert_allclose(lengths, store.norms("layer.1"), rtol=1e-6)

    page = (ROOT / "docs/how-to/hidden-states.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = {}
    exec("\n".join(blocks).replace("layer.-8", "layer.-2"), names)
    said = [line.split() for line in capsys.readouterr().out.splitlines() if " AUROC " in line]
    areas = {name: float(area) for name, _, area in said}
    assert list(areas) == ["probe", "confidence", "margin", "entropy", "contribution"]
    assert (
        min(areas[name] for name in ("confidence", "margin", "entropy")) > 0.7
    )  # the model knows when it knows
    assert 0.2 < areas["probe"] < 0.8
    frame = pd.read_parquet("states.parquet")
    rows = names["rows"]
    np.testing.assert_array_equal(np.stack(frame["state:layer.1"]), store.to_numpy("layer.1"))
    np.testing.assert_array_equal(np.asarray(rows["state:last"]), store.to_numpy("last"))
    documents = store.documents.drop(columns="logprobs")
    assert list(rows["text"]) == documents["text"].tolist()
    assert frame.drop(columns=["state:last", "state:layer.1", "logprobs"]).equals(documents)
