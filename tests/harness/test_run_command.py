"""``dispersion run`` in this process: users' own tasks, second runs, and failures in a sentence."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from harness_world import check_stored_run

from lmeval_dispersion import open_store
from lmeval_dispersion.cli import main
from lmeval_dispersion.harness import install, saving
from lmeval_dispersion.paths import data_folder
from lmeval_dispersion.store import read_store

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("in_world")

OWN = """
include: {theirs}/arc/arc_easy.yaml
task: my_questions
class: !function lmeval_dispersion.harness.DispersionTask
"""


@pytest.fixture(autouse=True)
def _quick_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """lm-eval reads all of its 10,000 task files before a run: here it has none of its own."""
    import lm_eval.tasks.manager as manager

    (tmp_path / "no-tasks").mkdir()
    monkeypatch.setattr(manager, "__file__", str(tmp_path / "no-tasks/manager.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level
    yield
    saving.written.clear()
    saving.remarks.clear()
    logger.handlers[:], logger.level = before


def run(model: Path, tasks: str, store: Path, *more: str) -> int:
    arguments = ["--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu"]
    arguments += ["--tasks", tasks, "--metadata", f"dispersion_store={store}"]
    return main(["run", *arguments, *(more if "--limit" in more else ("--limit", "3", *more))])


def test_a_users_own_tasks_run_beside_ours(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/mine.yaml").write_text(OWN.format(theirs=install.harness_tasks()))
    tasks = "my_questions,arc_easy_dispersion"
    assert run(model_folder, tasks, tmp_path / "store", "--include_path", str(tmp_path / "own")) == 0
    mine = read_store(tmp_path / "store/my_questions")
    ours = read_store(tmp_path / "store/arc_easy_dispersion")
    assert mine.documents["doc_hash"].equals(ours.documents["doc_hash"])


def test_a_second_run_into_a_store_says_how_to_go_on(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model_folder, "arc_easy_dispersion", tmp_path / "store") == 0
    capsys.readouterr()
    assert run(model_folder, "arc_easy_dispersion", tmp_path / "store") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == (
        f"dispersion run: {tmp_path / 'store/arc_easy_dispersion'} holds a finished store already: read it "
        "with `dispersion audit`, remove it, or choose another place for this run (dispersion_store, -o)"
    )


def test_the_command_with_default_options_stores_the_run(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model_folder},dtype=float32",
        "--device",
        "cpu",
    ]
    arguments += ["--tasks", "arc_easy_dispersion", "--output_path", str(tmp_path / "out")]
    assert main(["run", *arguments, "--metadata", '{"dispersion_layers": "last+layer.0"}']) == 0
    said = capsys.readouterr()
    assert "ootstrapping" not in said.out + said.err
    check_stored_run(tmp_path / "out", "arc_easy_dispersion")


def test_what_concerns_many_tasks_is_one_warning(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [f"{name}_dispersion" for name in ("arc_challenge", "arc_easy", "hellaswag", "truthfulqa_mc1")]
    assert run(model_folder, ",".join(tasks), tmp_path / "store", "--limit", "1") == 0
    assert "is NaN" not in capsys.readouterr().err
    saving.tell()
    said = capsys.readouterr().err.splitlines()
    warnings = [line for line in said if "dispersion is NaN" in line]
    assert warnings == [
        f"warning: 4 tasks ({', '.join(tasks[:3])}, …): dispersion is NaN (fewer than two documents)"
    ]
    assert said[-1] == f"next: dispersion audit {tmp_path / 'store'}"


def test_a_missing_chat_template_is_a_sentence(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(model_folder, plain)
    (plain / "chat_template.jinja").unlink()
    assert run(plain, "arc_easy_dispersion", tmp_path / "store", "--apply_chat_template") == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert (
        said.strip()
        .splitlines()[-1]
        .endswith("; leave --apply_chat_template out, or use a model whose tokenizer has a template")
    )


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


def test_the_page_on_hidden_states_does_what_it_says_on_a_real_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    with (tmp_path / "sums.jsonl").open("w") as file:
        for _ in range(150):
            a, b = draw.randrange(50), draw.randrange(50)
            choices = [a + b, *draw.sample([n for n in range(99) if n != a + b], 3)]
            draw.shuffle(choices)
            question = f"12+30=42. 40-2=38. 7+5=12. {a}+{b}="
            line = {
                "question": question,
                "choices": [f"{n}." for n in choices],
                "answer": choices.index(a + b),
            }
            file.write(json.dumps(line) + "\n")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/sums.yaml").write_text(SUMS.replace("SUMS.jsonl", str(tmp_path / "sums.jsonl")))
    metadata = json.dumps(
        {"dispersion_layers": "last+layer.-2", "dispersion_store": str(tmp_path / "states")}
    )
    model = f"pretrained={data_folder('demo') / 'sums-10'},dtype=float32"
    arguments = ["--model", "hf", "--model_args", model, "--device", "cpu", "--batch_size", "32"]
    arguments += ["--tasks", "sums", "--include_path", str(tmp_path / "tasks"), "--metadata", metadata]
    assert main(["run", *arguments]) == 0
    store = open_store(tmp_path / "states")
    assert repr(store).endswith("sums-10: 150 documents, layers last, layer.1>")
    np.testing.assert_array_equal(store.vectors("layer.-2"), store.vectors("layer.1"))
    lengths = np.linalg.norm(store.to_numpy("layer.-2"), axis=1)
    np.testing.assert_allclose(lengths, store.norms("layer.1"), rtol=1e-6)

    page = (ROOT / "docs/how-to/hidden-states.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    capsys.readouterr()
    names: dict[str, object] = {}
    exec("\n".join(blocks).replace("layer.-8", "layer.-2"), names)
    said = [line.split() for line in capsys.readouterr().out.splitlines() if " AUROC " in line]
    assert [name for name, _, _ in said] == ["probe", "confidence", "contribution"]
    areas = {name: float(area) for name, _, area in said}
    assert areas["confidence"] > 0.7  # the model knows when it knows
    assert 0.2 < areas["probe"] < 0.8
    frame = pd.read_parquet("states.parquet")
    rows = names["rows"]
    np.testing.assert_array_equal(np.stack(frame["state:layer.1"]), store.to_numpy("layer.1"))
    np.testing.assert_array_equal(np.asarray(rows["state:last"]), store.to_numpy("last"))  # type: ignore[index]
    assert list(rows["text"]) == store.documents["text"].tolist()  # type: ignore[index]
    assert frame.drop(columns=["state:last", "state:layer.1", "logprobs"]).equals(
        store.documents.drop(columns="logprobs")
    )
