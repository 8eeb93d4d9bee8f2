"""Results of stock lm-eval with --log_samples, in audit and compare: no vectors, lm-eval or torch."""

import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from harness_world import environment
from scipy.stats import binomtest

from lmeval_dispersion.auditing.compare import compare
from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import HarnessError, MixedStoresError, UsageError
from lmeval_dispersion.report import render
from lmeval_dispersion.store.samples import read_logged

FAMILIES = ("arc", "mmlu", "gsm8k", "wikitext")


def changed(folder, name, edit):
    """A copy of a run called ``name``, whose samples ``edit`` changes, given each and its line."""
    copy = folder.parent / name
    shutil.copytree(folder, copy)
    for file in copy.rglob("samples_*.jsonl"):
        samples = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        for i, sample in enumerate(samples):
            edit(sample, i)
        file.write_text("".join(json.dumps(sample) + "\n" for sample in samples), "utf-8")
    results = next(copy.rglob("results_*.json"))
    results.write_text(json.dumps(json.loads(results.read_text()) | {"model_name": f"org/{name}"}))
    return copy


@pytest.fixture
def logged(stock):
    """Four kinds of tasks and a group, answered by the tiny model."""
    tasks = ("arc_easy", "mmlu_stem", "gsm8k", "wikitext")
    return stock(*tasks, families=FAMILIES, out="base", gen_kwargs={"max_gen_toks": 8}, limit=5)[0]


def test_the_documents_are_those_of_a_store_from_the_same_samples(logged, from_samples):
    tasks = ["arc_easy", "gsm8k", "mmlu_anatomy"]
    expected = from_samples(logged, tasks=tasks).documents
    expected["task"] = expected["task"].str.removesuffix("_dispersion")
    expected["subject"] = expected["subject"].str.removesuffix("_dispersion")
    found = read_logged(logged)
    documents = found.documents[found.documents["task"].isin(tasks)]
    apart = ["query_perplexity", "prompt_tokens", "truncated", "text"]  # of a model, of a template
    frames = [
        frame.drop(columns=apart).sort_values(["task", "doc_id"], ignore_index=True)
        for frame in (documents, expected[found.documents.columns])
    ]
    for frame in frames:
        frame["logprobs"] = [list(values) for values in frame["logprobs"]]
    pd.testing.assert_frame_equal(*frames, check_dtype=False)
    facts = {
        row.doc_id: row.probability
        for row in documents[documents["task"] == "arc_easy"].itertuples()
    }
    for line in next(logged.rglob("samples_arc_easy_*.jsonl")).read_text().splitlines():
        sample = json.loads(line)
        shares = [math.exp(float(answer[0])) for answer in sample["filtered_resps"]]
        assert facts[sample["doc_id"]] == pytest.approx(shares[int(sample["target"])] / sum(shares))
    assert documents[documents["task"] == "gsm8k"]["probability"].isna().all()
    assert found.documents["task"].isin(["wikitext", "mmlu_astronomy"]).any()
    notes = " ".join(read_run(logged).notes)
    assert "gsm8k: answers are judged by strict-match/exact_match." in notes
    assert "wikitext: no metric scores single documents: word_perplexity, " in notes


def test_two_runs_are_paired_document_by_document(logged):
    def better(sample, line):
        if "acc" in sample and line % 2:
            sample["acc"] = 1.0

    other = changed(logged, "tuned", better)
    found = compare([logged, other])
    whole = found.others[0].slices[0]
    frames = [
        read_logged(place).documents.set_index(["task", "doc_id"])["correct"]
        for place in (logged, other)
    ]
    difference = (frames[1] - frames[0]).dropna()
    gained = int((difference > 0).sum())
    assert (whole.gained, whole.lost, whole.labelled) == (gained, 0, len(difference))
    assert whole.accuracy_p == pytest.approx(binomtest(gained, gained).pvalue)
    assert np.isnan(whole.dispersion)
    assert found.answer()[0].startswith(
        "tuned and tiny do not differ clearly in accuracy in the mean over 4 tasks"
    )
    once = next(sentence for sentence in found.answer() if "weighted equally" in sentence)
    assert (
        f"exact McNemar p {'< 0.001' if whole.accuracy_p < 0.001 else f'= {whole.accuracy_p:.3f}'}"
        in once
    )
    assert {row.slice for row in found.others[0].slices} >= {
        "arc_easy",
        "anatomy",
        "gsm8k",
        "wikitext",
    }
    assert found.notes[0].startswith(
        "Dispersion is not compared: samples of lm-eval hold no vectors; `dispersion"
    )
    assert "│" in render(found.document(), "table", width=80)
    page = render(found.document(), "html")
    assert (
        re.findall(r'<button type="button">([^<]*)</button><span class="dots', page)
        == ["Δ accuracy"] * 2
    )  # tasks, slices
    compared = found.others[0]
    rows = [
        *compared.slices,
        compared.slices[0],
        *compared.tasks,
    ]  # the tasks' table begins with all documents too
    drawn = [row for row in rows if not math.isnan(row.accuracy_difference)]
    assert page.count("<circle") == len(drawn) > 40


def test_what_differs_is_refused_or_left_out_and_counted(logged, stock):
    def other_target(sample, line):
        if line == 0 and sample["target"] in "0123":
            sample["target"] = str((int(sample["target"]) + 1) % 4)

    found = compare([logged, changed(logged, "targets", other_target)])
    assert any(
        "documents are left out, as they have another target in org/targets" in note
        for note in found.notes
    )
    assert found.left_out[0] == found.left_out[1] > 0
    with pytest.raises(HarnessError, match="its doc_hash differs"):
        read_logged(
            changed(logged, "edited", lambda sample, _: sample["doc"].update(question="another?"))
        )
    with pytest.raises(HarnessError, match="has another record of document 0"):
        read_logged(changed(logged, "twice", lambda sample, _: sample.update(doc_id=0)))
    fewshot, _ = stock("arc_easy", families=("arc",), out="fewshot", num_fewshot=2, limit=5)
    with pytest.raises(MixedStoresError, match=r"differ in num_fewshot \(0 and 2\)"):
        compare([logged, fewshot])
    only, _ = stock("arc_easy", families=("arc",), out="only", limit=5)
    part = compare([logged, only])
    assert (part.documents, part.left_out[1]) == (5, 0)
    assert "5 shared documents, " in part.answer()[-1]
    assert [row.slice for row in part.others[0].slices] == ["all documents"]
    assert not any(task in note for note in part.notes for task in ("gsm8k", "wikitext"))
    both = only.parent / "both"
    for place in (only, fewshot):
        shutil.copytree(place, both, dirs_exist_ok=True)
    with pytest.raises(HarnessError, match="holds the samples of 2 runs; name one of them"):
        read_logged(both)
    assert len(read_logged(next(both.rglob("results_*.json"))).documents) == 5


def test_a_store_and_plain_samples_of_one_model_are_one_run(logged, from_samples, tmp_path):
    from_samples(logged, "store", tasks=["arc_easy"])
    found = compare([tmp_path / "store", logged])
    whole = found.others[0].slices[0]
    assert (found.documents, whole.gained, whole.lost) == (5, 0, 0)
    assert found.left_out[0] == 0


def test_an_audit_of_samples_has_what_needs_no_vectors_and_says_the_way_to_the_rest(logged, capsys):
    def good(sample, line):
        if "acc" in sample:
            sample["acc"] = float(line < 4)

    report = audit(changed(logged, "good", good), short=True)
    assert report.answer()[0].startswith(("The model is ", "The model's confidence"))
    assert "Logs hold no vectors" in report.answer()[1]
    assert "dispersion embed org/good --from-samples" in report.missing["mixtures"]
    assert set(report.missing) == {"mixtures", "calibration", "ranking"}
    assert (
        main(["audit", str(logged.parent / "good")]) == 0
    )  # all that a run without vectors can show
    assert (
        "ranking could not be computed: samples of lm-eval hold no vectors"
        in capsys.readouterr().err
    )
    assert report.reliability.documents == report.answers.with_choices
    shown = render(report.document(), "table", width=80)
    assert "least accurate first" in shown
    assert "Dispersion" not in shown.split("least accurate first")[1].split("More:")[0]
    pages = [audit(logged.parent / "good", details=True), audit(logged, short=True)]
    whole, cautious = (render(page.document(), "table", details=True, width=80) for page in pages)
    assert pages[1].cautions
    for text in (
        whole,
        cautious,
    ):  # the missing vectors are said once, and no more of what needs them
        assert text.count("dispersion embed") == (text is whole)
        assert "correlation" not in text
        assert "Left out" not in text
    for ask in (lambda: read_run(logged).vectors, lambda: audit(logged, metrics="all")):
        with pytest.raises(UsageError, match="samples of lm-eval hold no vectors"):
            ask()


def test_neither_torch_nor_lm_eval_is_imported(logged):
    script = (
        "import sys; from lmeval_dispersion.cli import main; main(sys.argv[1:]);"
        "print(sorted({'torch', 'transformers', 'lm_eval', 'datasets'} & set(sys.modules)), file=sys.stderr)"
    )
    for words in (["compare", logged, logged], ["audit", logged]):
        command = [sys.executable, "-c", script, *map(str, words)]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=False
        )
        assert done.stderr.strip().endswith("[]"), done.stderr
        assert done.stdout
