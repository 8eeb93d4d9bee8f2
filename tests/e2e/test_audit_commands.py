"""The audit's commands as a user runs them, with real models and mistakes."""

import csv
import io
import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
import tiny_models
from synthetic import planted_store, sliced_store

from lmeval_dispersion import embed
from lmeval_dispersion.cli import main
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.usefixtures("two_splits")


@pytest.fixture
def dispersion_command(in_process):
    """``dispersion`` in this process (a fresh one costs seconds of imports), without a Hub."""
    return partial(in_process, endpoint="http://127.0.0.1:9", main=main)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return planted_store(tmp_path_factory.mktemp("run") / "store", n=1000, effect=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.saved(tmp_path_factory.mktemp("model"), tiny_models.llama())


def sentence(result):
    """The sentence of a command that refused its arguments or data."""
    assert result.returncode == 2, result.stderr
    return result.stderr.strip()


def test_the_bundled_run_is_audited_anywhere(dispersion_command, tmp_path):
    opening = " ".join(dispersion_command("audit", "--demo").stdout.split())
    assert opening.startswith(
        "76.8 % of 600 right, dispersion 0.7937; weakest subject: 0x + 0x (52%)."
    )
    assert (
        "Dispersion cannot replace labels here: it does not reliably beat the labelled" in opening
    )
    assert "whose confidence is above a threshold (ATC) does (6.7)." in opening
    assert list(tmp_path.iterdir()) == []


def test_two_runs_are_compared(dispersion_command, store, tmp_path):
    other = planted_store(
        tmp_path / "other", n=1000, effect=0.8, manifest={"model": "synthetic/other"}
    )
    assert f"`dispersion compare {store} {other}` compares" in sentence(
        dispersion_command("audit", store, other)
    )
    both = dispersion_command("compare", store, other)
    assert both.returncode == 0, both.stderr
    assert "other is more dispersed than model (" in both.stdout
    printed = dispersion_command(
        "compare", store, other, "--slice", "length", "--format", "json"
    ).stdout
    assert json.loads(printed)["by"] == "length"


def texts_file(path, n=40):
    """Texts of known words; the labels and subjects travel along."""
    rng = np.random.default_rng(0)
    with path.open("w") as stream:
        for i in range(n):
            words = " ".join(rng.choice(tiny_models.WORDS, size=rng.integers(3, 20)))
            line = {
                "text": words,
                "correct": i % 2,
                "subject": f"s{i % 3}",
                "source": f"web {i % 2}",
            }
            stream.write(json.dumps(line) + "\n")
        stream.write("not json\n\n")
    return path


def test_store_of_texts_holds_the_models_own_states(dispersion_command, model, tmp_path):
    """Slow: one text at a time through transformers, no padding, no hooks."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = texts_file(tmp_path / "texts.jsonl")
    layers = ["--layer", "last", "--layer", "layer.1"]
    result = dispersion_command("embed", model, file, "-o", tmp_path / "s", *layers)
    assert result.returncode == 0, result.stderr
    assert "(1 undecodable)" in result.stderr
    store = read_store(tmp_path / "s")
    assert store.layers == ["last", "layer.1"]
    assert store.documents["correct"].tolist() == [0.0, 1.0] * 20
    assert set(store.documents["subject"]) == {"s0", "s1", "s2"}
    assert store.documents["source"].tolist() == ["web 0", "web 1"] * 20
    loaded, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
    )
    expected = {"last": [], "layer.1": []}
    for row, text in enumerate(store.documents["text"]):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = loaded(input_ids=ids, output_hidden_states=True)
        expected["last"].append(out.hidden_states[-1][0, -1].numpy())
        expected["layer.1"].append(out.hidden_states[2][0, -1].numpy())
        loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
        assert store.documents["query_perplexity"][row] == pytest.approx(
            float(loss.exp()), rel=1e-4
        )
        assert store.documents["prompt_tokens"][row] == ids.shape[1]
    for name, rows in expected.items():
        x = np.array(rows)
        u = x / np.linalg.norm(x, axis=1, keepdims=True)
        np.testing.assert_allclose(store.vectors(name), u, atol=6e-4)
        assert dispersion(store.vectors(name)) == pytest.approx(dispersion(x), rel=1e-3)
    of_python = read_store(embed(str(model), file, tmp_path / "p", layer=["last", "layer.1"]))
    assert of_python.layers == store.layers
    np.testing.assert_array_equal(of_python.to_numpy("layer.1"), store.to_numpy("layer.1"))
    audit = dispersion_command("audit", tmp_path / "s", "--slice", "source", "--format", "csv")
    assert audit.returncode == 3
    assert "calibration could not be computed" in audit.stderr
    rows = {row["slice"]: row for row in csv.DictReader(audit.stdout.splitlines())}
    assert (rows["web 0"]["documents"], rows["web 0"]["labelled"]) == ("20", "20")


def test_a_store_of_texts_that_was_stopped_resumes_to_the_same_bits(model, tmp_path, monkeypatch):
    from lmeval_dispersion.harness.embedding import texts as text_run

    monkeypatch.setattr(text_run, "_TOKENS", 32)
    forward, done = text_run._forward, []

    def counted(loaded, texts, layers):
        if len(done) == 3:
            done.append(None)
            raise KeyboardInterrupt
        done.append(texts)
        return forward(loaded, texts, layers)

    file = texts_file(tmp_path / "texts.jsonl")
    whole = read_store(embed(str(model), file, tmp_path / "whole"))
    monkeypatch.setattr(text_run, "_forward", counted)
    with pytest.raises(KeyboardInterrupt):
        embed(str(model), file, tmp_path / "stopped")
    resumed = read_store(embed(str(model), file, tmp_path / "stopped"))
    batches = [str(texts) for texts in done if texts]
    assert len(batches) == len(set(batches)) > 4  # each once
    np.testing.assert_array_equal(resumed.to_numpy("last"), whole.to_numpy("last"))
    assert resumed.documents.equals(whole.documents)
    assert not [*(tmp_path / "stopped").glob(".*")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "absent"], "is not a folder"),
        (["audit", "STORE", "--layer", "first"], "has no layer 'first'; name "),
        (["audit", "STORE", "--slice", "nothing"], "there is no column 'nothing' to slice by"),
        (
            ["audit", "STORE", "-o", "absent/x.txt"],
            "--output: expected a file in an existing folder",
        ),
        (
            ["calibrate", "STORE", "-o", "absent/c.json"],
            "--output: expected a file in an existing folder",
        ),
        (["calibrate", "STORE", "-o", "."], "--output: expected a file, got the folder"),
        (["audit", "TEXTS"], "is not a folder; `dispersion embed MODEL FILE -o STORE` makes"),
        (["audit", "STORE", "--slice", "target"], "the column 'target' is empty"),
        (
            ["calibrate", "STORE", "--from", "absent.json"],
            "expected a calibrator (dispersion-calibrator/3), but absent.json does",
        ),
        (["audit", "STORE", "--worst", "0"], "--worst: expected at least 1"),
        (["audit"], "expected a RUN"),
        (["calibrate", "STORE", "--from", "TEXTS"], "expected a calibrator"),
        (["calibrate", "STORE", "--from", "c.json", "--layer", "last"], "leave out `--layer`"),
        (["audit", "run", "--demo"], "leave out run or `--demo`"),
        (
            ["audit", "STORE", "--worst", "5", "--slice", "category"],
            "have no effect with `--worst`",
        ),
        (["compare", "STORE", "STORE", "--layer", "layer.9"], "layer.9"),
        (["calibrate", "STORE", "--slice", "nothing"], "no column 'nothing'"),
        (["embed", "no/such/folder/at-all", "TEXTS", "-o", "s"], "does not exist"),
        (
            ["embed", "MODEL", "TEXTS", "-o", "s", "--model_args", "float32"],
            "--model_args: expected K=V,K=V, got 'float32'",
        ),
        (
            ["embed", "MODEL", "TEXTS", "-o", "s", "--model_args", "max_length=8"],
            "trust_remote_code, got max_length",
        ),
        (["embed", "MODEL", "TEXTS", "-o", "TEXTS"], "TEXTS.jsonl cannot be written: File exists"),
        (
            ["embed", "MODEL", "YES", "-o", "s"],
            "expected numbers from 0 to 1 in the column `correct`",
        ),
        (
            ["embed", "MODEL", "TWO", "-o", "s"],
            "expected numbers from 0 to 1 in the column `correct`",
        ),
    ],
)
def test_mistakes_are_one_sentence(dispersion_command, store, model, tmp_path, arguments, message):
    places = {"STORE": store, "MODEL": model}
    for name, labels in {"TEXTS": {}, "YES": {"correct": "yes"}, "TWO": {"correct": 2}}.items():
        places[name] = tmp_path / f"{name}.jsonl"
        places[name].write_text(json.dumps({"text": "w1 w2", **labels}) + "\n")
    result = dispersion_command(*[places.get(a, a) for a in arguments])
    assert message in sentence(result)


def test_an_audit_as_rows_and_as_a_page(dispersion_command, store, tmp_path):
    lines = dispersion_command("audit", store, "--format", "csv", "--slice", "truncated").stdout
    rows = list(csv.DictReader(lines.splitlines()))
    assert [row["by"] for row in rows[:2]] == ["all", "truncated"]
    assert {row["by"] for row in rows} == {
        "all",
        "subject",
        "category",
        "length",
        "confidence",
        "truncated",
    }
    ranked = pd.read_csv(
        io.StringIO(dispersion_command("audit", store, "--worst", "5", "--format", "csv").stdout)
    )
    assert len(ranked) == 1000
    assert ranked["contribution"].is_monotonic_increasing
    page = tmp_path / "page.html"
    headings = {
        "": (
            "6 slices by subject",
            "Controlled mixtures",
            "Calibration",
            "Documents to look at first",
        )
    }
    for options, shown in {**headings, "--worst 5": ("Accuracy by decile",)}.items():
        written = dispersion_command("audit", store, *options.split(), "-o", page)
        assert written.returncode == 0
        assert written.stdout.endswith(".\n")  # the answer comes with a file, too
        assert page.read_text().startswith("<!DOCTYPE html>")
        assert all(heading in page.read_text() for heading in shown)


def test_calibrate_on_a_part_then_estimate_the_rest(dispersion_command, tmp_path):
    sliced, file = sliced_store(tmp_path / "store"), tmp_path / "c.json"
    done = dispersion_command("calibrate", sliced, "-o", file, "--where", "part == 'labelled'")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Dispersion")
    assert "worth" in done.stdout.split("An estimate is about")[0]
    result = dispersion_command("calibrate", sliced, "--from", file, "--format", "json")
    whole, *rows = json.loads(result.stdout)["slices"]
    refused = [row["slice"] for row in rows if row["reason"] is not None]
    assert result.returncode == (3 if refused else 0)
    assert len(refused) < 10
    assert {row["slice"] for row in rows} == {f"slice {i:03d}" for i in range(40, 80)}
    assert whole["predicted"] == pytest.approx(whole["true"], abs=0.05)
    assert refused == [row["slice"] for row in rows if row["predicted"] is None]
    text = dispersion_command(
        "calibrate", sliced, "--from", file, "--where", "subject in ('slice 050', 'slice 051')"
    )
    assert text.stdout.startswith("The accuracy of ")
    assert text.stdout.count("slice 05") == 2
    assert (
        dispersion_command(
            "calibrate", planted_store(tmp_path / "small", n=60), "--from", file
        ).returncode
        == 1
    )
    same = sentence(
        dispersion_command("calibrate", sliced, "--from", file, "--where", "part == 'labelled'")
    )
    assert "calibrate again on a part of this run" in same


def test_a_calibrator_of_noise_is_refused(dispersion_command, tmp_path):
    noise, file = sliced_store(tmp_path / "noise", effect=0.0), tmp_path / "n.json"
    calibrated = dispersion_command("calibrate", noise, "-o", file, "--where", "part == 'labelled'")
    assert (calibrated.returncode, calibrated.stdout[:11]) == (0, "Do not use:")
    assert "next:" not in calibrated.stderr
    assert "worse than the labelled accuracy" in " ".join(calibrated.stdout.split())  # in any width
    assert "n.json should not be used" in sentence(
        dispersion_command("calibrate", noise, "--from", file)
    )
