"""The audit's commands as a user runs them, in fresh processes, with real models and mistakes."""

import contextlib
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import tiny_models  # noqa: E402
from synthetic import documents, planted_store, sliced_store, vectors  # noqa: E402

from lmeval_dispersion.cli import main  # noqa: E402
from lmeval_dispersion.geometry import dispersion  # noqa: E402
from lmeval_dispersion.store import read_store, write_store  # noqa: E402


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def dispersion_command(*arguments):
    """Run the command in this process (a fresh one costs seconds of imports); see also `fresh`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def fresh(*command):
    """A process of its own."""
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return planted_store(tmp_path_factory.mktemp("run") / "store", n=2400, effect=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.saved(tmp_path_factory.mktemp("model"), tiny_models.llama())


def sentence(result, code):
    """The command failed with this code and one line on stderr, without a traceback."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.strip()


def test_the_audit_loads_neither_torch_nor_transformers(store):
    script = (
        "import sys; from lmeval_dispersion.cli import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'lm_eval', 'datasets'} & set(sys.modules);"
        "print(sorted(heavy), file=sys.stderr)"
    )
    result = fresh(sys.executable, "-c", script, "audit", store)
    assert result.stderr.strip().endswith("[]"), result.stderr


def test_audit_as_json_and_as_a_page(store, tmp_path):
    lines = dispersion_command("audit", store, "--format", "csv", "--slice", "truncated").stdout
    rows = list(csv.DictReader(lines.splitlines()))
    assert [row["by"] for row in rows[:2]] == ["all", "subject"]
    assert {row["by"] for row in rows} == {"all", "subject", "category", "length", "confidence", "truncated"}
    page = dispersion_command("audit", store, "-o", tmp_path / "page.html")
    assert (page.returncode, page.stdout) == (0, "")
    text = (tmp_path / "page.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    for heading in ("6 slices by subject", "Controlled mixtures", "Calibration", "Which documents"):
        assert heading in text


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["embed", "m", "t.txt", "-o", "s"], "torch", "models"),
        (["audit", "STORE"], "pyarrow", "audit"),
        (["audit", "STORE"], "safetensors", "audit"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(store, arguments, package, extra):
    script = (
        f"import sys; sys.modules[{package!r}] = None; from lmeval_dispersion.cli import main;"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = [store if argument == "STORE" else argument for argument in arguments]
    result = fresh(sys.executable, "-c", script, *arguments)
    assert f"needs {package}, which" in sentence(result, 1).replace("need ", "needs ")
    assert f"pip install 'lmeval-dispersion[{extra}]'" in result.stderr


@pytest.fixture(scope="module")
def sliced(tmp_path_factory):
    return sliced_store(tmp_path_factory.mktemp("sliced") / "store")


def test_calibrate_on_a_part_then_predict_the_rest(sliced, tmp_path):
    done = dispersion_command("calibrate", sliced, "-o", tmp_path / "c.json", "--where", "part == 'labelled'")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Dispersion")
    assert "worth" in done.stdout.split("An estimate is about")[0]
    assert json.loads((tmp_path / "c.json").read_text())["format"] == "dispersion-calibrator/2"
    result = dispersion_command("predict", tmp_path / "c.json", sliced, "--format", "json")
    rows = json.loads(result.stdout)["slices"]
    refused = [row["reason"] is not None for row in rows]
    assert result.returncode == (3 if any(refused) else 0)
    assert sum(refused) < 10
    assert {row["slice"] for row in rows[1:]} == {f"slice {i:03d}" for i in range(40, 80)}
    assert rows[0]["predicted"] == pytest.approx(rows[0]["true"], abs=0.05)
    assert all(row["predicted"] is None for row, no in zip(rows, refused, strict=True) if no)
    text = dispersion_command("predict", tmp_path / "c.json", sliced)
    assert text.stdout.startswith("The accuracy of ")
    one = ["--where", "subject in ('slice 050', 'slice 051')"]
    two = json.loads(
        dispersion_command("predict", tmp_path / "c.json", sliced, *one, "--format", "json").stdout
    )
    assert [row["slice"] for row in two["slices"][1:]] == ["slice 050", "slice 051"]


def test_predict_refuses_what_it_should(sliced, store, tmp_path):
    done = dispersion_command("calibrate", sliced, "-o", tmp_path / "c.json", "--where", "part == 'labelled'")
    assert done.returncode == 0, done.stderr
    foreign = planted_store(tmp_path / "foreign", n=300, manifest={"model": "else"})
    message = sentence(dispersion_command("predict", tmp_path / "c.json", foreign), 2)
    assert "fitted for model 'synthetic/model', and the run has 'else'" in message
    small = planted_store(tmp_path / "small", n=60)
    assert dispersion_command("predict", tmp_path / "c.json", small).returncode == 1
    same = sentence(
        dispersion_command("predict", tmp_path / "c.json", sliced, "--where", "part == 'labelled'"), 2
    )
    assert "calibrate on a part of this one with --where" in same
    noise = sliced_store(tmp_path / "noise", effect=0.0)
    done = dispersion_command("calibrate", noise, "-o", tmp_path / "n.json", "--where", "part == 'labelled'")
    assert done.returncode == 0
    assert done.stdout.startswith("Do not use: ")
    message = sentence(dispersion_command("predict", tmp_path / "n.json", noise), 2)
    assert "n.json should not be used" in message
    forced = dispersion_command("predict", tmp_path / "n.json", noise, "--force")
    assert forced.returncode in (0, 3)
    assert "Forced: this calibrator did not beat" in " ".join(forced.stdout.split())


def test_the_worst_documents_in_every_format(store, tmp_path):
    text = dispersion_command("audit", store, "--worst", "5")
    assert text.returncode == 0, text.stderr
    assert "The 5 documents of lowest contribution of 2400" in text.stdout
    assert len(text.stdout.splitlines()) <= 30
    printed = dispersion_command("audit", store, "--worst", "5", "--format", "csv").stdout
    frame = pd.read_csv(io.StringIO(printed))
    assert len(frame) == 2400
    assert frame["contribution"].is_monotonic_increasing
    report = json.loads(dispersion_command("audit", store, "--worst", "5", "--format", "json").stdout)
    assert len(report["documents"]) == 2400
    page = dispersion_command("audit", store, "--worst", "5", "-o", tmp_path / "page.html")
    assert (page.returncode, page.stdout) == (0, "")
    assert "Accuracy by decile" in (tmp_path / "page.html").read_text()


def test_the_bundled_run_is_audited_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options in ([], ["--worst", "5"]):
        result = dispersion_command("audit", "--demo", *options)
        assert result.returncode == 0, result.stderr
        assert len(result.stdout.splitlines()) <= 40
    assert "No verdict: the accuracy of 20.6 %" in dispersion_command("audit", "--demo").stdout
    assert list(tmp_path.iterdir()) == []
    assert "got both: run" in sentence(dispersion_command("audit", "run", "--demo"), 2)


def test_two_runs_are_compared(store, tmp_path):
    other = planted_store(tmp_path / "other", n=2400, effect=0.8, manifest={"model": "synthetic/other"})
    both = dispersion_command("audit", store, other)
    assert both.returncode == 0, both.stderr
    assert both.stdout == dispersion_command("compare", store, other).stdout
    assert "synthetic/other against synthetic/model: dispersion +" in both.stdout
    assert "are for one run" in sentence(dispersion_command("audit", store, other, "--worst", "5"), 2)
    assert "layer.9" in sentence(dispersion_command("compare", store, other, "--layer", "layer.9"), 2)


def texts_file(path, n=40):
    """Texts of known words; the labels and subjects travel along."""
    rng = np.random.default_rng(0)
    with path.open("w") as stream:
        for i in range(n):
            words = " ".join(rng.choice(tiny_models.WORDS, size=rng.integers(3, 20)))
            line = {"text": words, "correct": i % 2, "subject": f"s{i % 3}", "source": f"web {i % 2}"}
            stream.write(json.dumps(line) + "\n")
        stream.write("not json\n\n")
    return path


def test_store_of_texts_holds_the_models_own_states(model, tmp_path):
    """Slow: one text at a time through transformers, no padding, no hooks."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = texts_file(tmp_path / "texts.jsonl")
    layers = ["--layer", "last", "--layer", "layer.1"]
    result = dispersion_command("embed", model, file, "-o", tmp_path / "s", *layers)
    assert result.returncode == 0, result.stderr
    assert "skipped 1 undecodable" in result.stderr
    store = read_store(tmp_path / "s")
    assert store.layers == ["last", "layer.1"]
    assert store.documents["correct"].tolist() == [0.0, 1.0] * 20
    assert set(store.documents["subject"]) == {"s0", "s1", "s2"}
    assert store.documents["source"].tolist() == ["web 0", "web 1"] * 20
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    expected = {"last": [], "layer.1": []}
    for row, text in enumerate(store.documents["text"]):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = loaded(input_ids=ids, output_hidden_states=True)
        expected["last"].append(out.hidden_states[-1][0, -1].numpy())
        expected["layer.1"].append(out.hidden_states[2][0, -1].numpy())
        loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
        assert store.documents["query_perplexity"][row] == pytest.approx(float(loss.exp()), rel=1e-4)
        assert store.documents["prompt_tokens"][row] == ids.shape[1]
    for name, rows in expected.items():
        x = np.array(rows)
        u = x / np.linalg.norm(x, axis=1, keepdims=True)
        np.testing.assert_allclose(store.vectors(name), u, atol=6e-4)
        assert dispersion(store.vectors(name)) == pytest.approx(dispersion(x), rel=1e-3)
    audit = dispersion_command("audit", tmp_path / "s", "--slice", "source", "--format", "csv")
    assert audit.returncode == 3
    assert "calibration not available" in audit.stderr
    assert "source,web 0,20,20," in audit.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "absent"], "is no folder"),
        (["audit", "STORE", "--layer", "first"], "has no layer 'first'; it has last"),
        (["audit", "STORE", "--slice", "nothing"], "there is no column 'nothing' to slice by"),
        (["audit", "STORE", "-o", "absent/x.txt"], "expected --output in an existing folder"),
        (["calibrate", "STORE", "-o", "absent/c.json"], "expected --output in an existing folder"),
        (["calibrate", "STORE", "-o", "."], "expected --output to be a file, got the folder"),
        (["audit", "TEXTS"], "which is no folder; `dispersion embed MODEL FILE` makes a run of texts"),
        (["audit", "STORE", "--slice", "target"], "the column 'target' is empty"),
        (["predict", "absent.json", "STORE"], "expected a calibrator from `dispersion calibrate`"),
        (["audit", "STORE", "--worst", "0"], "expected --worst to be 1 or more"),
        (["audit"], "expected a RUN"),
        (["predict", "STORE"], "expected CALIBRATOR and RUN, got no CALIBRATOR"),
        (["predict", "TEXTS"], "expected CALIBRATOR and RUN, got no RUN"),
        (["embed", "no/such/folder/at-all", "TEXTS", "-o", "s"], "does not exist"),
    ],
)
def test_mistakes_are_one_sentence(store, tmp_path, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text('{"text": "w1 w2"}\n')
    places = {"STORE": store, "TEXTS": tmp_path / "t.jsonl"}
    result = dispersion_command(*[places.get(a, a) for a in arguments])
    assert message in sentence(result, 2)


def test_a_label_that_is_no_share_is_refused(model, tmp_path):
    for value in ("yes", 2):
        (tmp_path / "t.jsonl").write_text(json.dumps({"text": "w1 w2", "correct": value}) + "\n")
        result = dispersion_command("embed", model, tmp_path / "t.jsonl", "-o", tmp_path / "s")
        assert "expected numbers in [0, 1] in the column `correct`" in sentence(result, 2)


def test_parts_that_cannot_be_had_are_said_and_the_rest_appears(tmp_path):
    rng = np.random.default_rng(0)
    frame = documents(np.ones(50), rng=rng)
    write_store(tmp_path / "s", documents=frame, vectors={"last": vectors(np.ones(50), rng=rng)}, manifest={})
    result = dispersion_command("audit", tmp_path / "s")
    assert result.returncode == 3
    assert "6 slices by subject" in result.stdout
    assert "mixtures not available: mixtures need right and wrong answers" in result.stderr
    whole = dispersion_command("audit", tmp_path / "s", "--details")
    assert "Not available: mixtures need right and wrong answers" in whole.stdout
    assert "ranking not available" in result.stderr
