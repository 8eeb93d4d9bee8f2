"""lm-eval's logs as others leave them: every form, comparability, metrics; right values by scipy."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import field_logs as logs
import numpy as np
import pytest
from lmeval_screener.shortlist.accuracies import read_accuracies
from scipy.stats import binomtest, ttest_rel

from lmeval_dispersion import compare, compare_samples
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import DispersionError, HarnessError, MixedStoresError, UsageError
from lmeval_dispersion.logs.runs import find_runs
from lmeval_dispersion.store.samples import read_logged, read_scores

N = 60
RNG = np.random.default_rng(0)
FIRST = RNG.random(N) < 0.5
SECOND = np.where(RNG.random(N) < 0.3, True, FIRST)
GAINED = int((SECOND & ~FIRST).sum())
LOST = int((FIRST & ~SECOND).sum())
VERSIONS = ("0.4.0", "0.4.2", "0.4.3", "0.4.5", "0.4.7", "0.4.9", "0.4.13")


def entries(right: np.ndarray) -> list[logs.Entry]:
    return [logs.choices(i, bool(value)) for i, value in enumerate(right)]


def pair(
    folder: Path, version: str, change: Callable[[Path], Path] = lambda run: run
) -> tuple[Path, Path]:
    """Two runs, whose right values are FIRST and SECOND."""
    return tuple(
        change(logs.write(folder, version, name, entries(right)))
        for name, right in (("base", FIRST), ("tuned", SECOND))
    )


CASES = {
    **{f"folders of {version}": (version, lambda run: run) for version in VERSIONS},
    # metabench and neulab/pace keep the samples alone.
    "samples alone, 0.4.0": ("0.4.0", lambda run: logs.samples_file(logs.alone(run))),
    "samples alone, 0.4.5": ("0.4.5", lambda run: logs.samples_file(logs.alone(run))),
    "samples alone, 0.4.13": ("0.4.13", lambda run: logs.samples_file(logs.alone(run))),
    "a folder of samples alone": ("0.4.5", logs.alone),
    # lm-eval issue 2966; pmemoli/Data-Science-Thesis.
    "NAME_DATE.json": ("0.4.9", logs.by_output_file),
    "a results file": ("0.4.13", lambda run: next(run.rglob("results_*"))),
    "gzipped": ("0.4.13", logs.zipped),
    "gzipped, 0.4.2": ("0.4.2", logs.zipped),
    "gzipped samples alone": ("0.4.7", lambda run: logs.samples_file(logs.zipped(logs.alone(run)))),
    "a byte-order mark": ("0.4.13", logs.marked),
    "a byte-order mark, alone": (
        "0.4.3",
        lambda run: logs.samples_file(logs.marked(logs.alone(run))),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_two_runs_of_every_form_are_compared(case, tmp_path):
    first, second = pair(tmp_path, *CASES[case])
    found = compare([first, second]).others[0].slices[0]
    assert (found.labelled, found.gained, found.lost) == (N, GAINED, LOST)
    assert found.accuracy == SECOND.mean()
    assert found.accuracy_baseline == FIRST.mean()
    assert found.accuracy_p == pytest.approx(binomtest(GAINED, GAINED + LOST).pvalue)
    by_python = compare_samples(first, second)
    assert (by_python.documents, by_python.gained, by_python.lost) == (N, GAINED, LOST)


@pytest.mark.parametrize("case", CASES)
def test_a_name_that_one_command_takes_every_command_takes(case, tmp_path, capsys):
    first, second = map(str, pair(tmp_path, *CASES[case]))
    assert main(["compare", first, second, "-q"]) == 0
    assert main(["audit", second, "-q"]) == 0
    capsys.readouterr()
    assert main(["race", "--replay", first, second, "--format", "json", "-q"]) == 0
    scores = [row["score"] for row in json.loads(capsys.readouterr().out)["checkpoints"]]
    assert scores == pytest.approx([SECOND.mean(), FIRST.mean()])


@pytest.mark.parametrize("version", VERSIONS)
def test_two_versions_of_lm_eval_are_compared(version, tmp_path):
    first = logs.write(tmp_path, version, "base", entries(FIRST))
    second = logs.write(tmp_path, "0.4.13", "tuned", entries(SECOND))
    found = compare([first, second]).others[0].slices[0]
    assert (found.labelled, found.gained, found.lost) == (N, GAINED, LOST)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("results", [True, False])
def test_several_filters_keep_their_scores(version, results, tmp_path):
    strict = [i % 4 == 0 for i in range(N)]
    flexible = [i % 4 != 1 for i in range(N)]
    by_filter = [logs.written(i, strict[i], flexible[i]) for i in range(N)]
    # lm-eval goes through all documents of a filter, then through those of the next.
    lines = [each[0] for each in by_filter] + [each[1] for each in by_filter]
    run = logs.write(tmp_path, version, "base", lines)
    if not results:
        logs.alone(run)
    second = "filter 2" if not results and logs.before(version, "0.4.7") else "flexible-extract"
    assert np.mean([sample.correct for sample in read_scores(run)[1].values()]) == np.mean(strict)
    name, scores = read_scores(run, f"{second}/exact_match")
    assert np.mean([sample.correct for sample in scores.values()]) == np.mean(flexible)
    assert name == f"{second}/exact_match"


def test_documents_that_ranks_wrote_twice_count_once(tmp_path):
    """lm-eval pads the last batch of a rank: issue 1687, accelerate issue 125."""
    lines = entries(FIRST)
    for version in VERSIONS:
        run = logs.write(tmp_path / version, version, "base", [*lines, *lines[:3]])
        store = read_logged(run)
        assert store.documents["correct"].tolist() == FIRST.astype(float).tolist()
        assert any("3 lines repeat an earlier line" in note for note in store.manifest["notes"])
        other = {**lines[0], "acc": 1 - lines[0]["acc"]}
        run = logs.write(tmp_path / f"{version}-other", version, "base", [*lines, other])
        with pytest.raises(
            HarnessError, match=r"(line|element) \d+ has another record of document 0"
        ):
            read_logged(run)


@pytest.mark.parametrize("named", ["results.json", "model.json"])
def test_older_logs_of_two_models_in_one_folder_are_told_apart(named, tmp_path):
    """EleutherAI/lm-evaluation-harness, branch with scheming_evals: several models in one folder."""
    runs = pair(tmp_path / "apart", "0.4.2")
    place = tmp_path / "together"
    place.mkdir()
    for run in runs:
        file = logs.samples_file(run)
        file.rename(place / file.name)
        (run / "results.json").rename(
            place / (named if named == "results.json" else f"{run.name}.json")
        )
    found = {logged.model: logged for logged in find_runs(place)}
    assert "lab/tuned" in found
    assert len(found) == 2
    with pytest.raises(HarnessError, match="holds the samples of 2 runs; name one of them"):
        read_logged(place)
    files = sorted(place.glob("*.jsonl"))
    whole = compare(files).others[0].slices[0]
    assert (whole.labelled, whole.gained, whole.lost) == (N, GAINED, LOST)


def test_two_files_in_one_folder_have_two_names(tmp_path, capsys):
    first, second = (logs.samples_file(logs.alone(run)) for run in pair(tmp_path, "0.4.13"))
    other = second.rename(first.with_name(first.name.replace("2026-01-26", "2026-01-27")))
    assert main(["race", "--replay", str(first), str(other), "--format", "json", "-q"]) == 0
    scores = [row["score"] for row in json.loads(capsys.readouterr().out)["checkpoints"]]
    assert scores == pytest.approx([SECOND.mean(), FIRST.mean()])


def test_tasks_that_a_model_answered_at_two_times_are_one_run(tmp_path):
    run = logs.write(tmp_path, "0.4.13", "base", entries(FIRST))
    other = logs.write(tmp_path / "later", "0.4.13", "base", entries(SECOND), task="other_sums")
    for file in other.rglob("*.json*"):
        file.rename(run / "lab__base" / file.name.replace("2026-01-26", "2026-01-27"))
    scores = read_logged(run).documents.groupby("task")["correct"].mean()
    assert scores.to_dict() == {logs.TASK: FIRST.mean(), "other_sums": SECOND.mean()}


def asked(
    folder: Path,
    name: str,
    right: np.ndarray,
    prompt: str = "Q: ",
    version: str = "0.4.13",
    **results: object,
) -> Path:
    """A run whose prompts begin with ``prompt``."""
    lines = [logs.choices(i, bool(value), prompt) for i, value in enumerate(right)]
    return logs.write(folder, version, name, lines, **results)


def configured(**changes: object) -> dict[str, object]:
    """Results of a task whose configuration has ``changes``."""
    content = logs.results("", entries(FIRST))
    content["configs"][logs.TASK].update(changes)
    return {"configs": content["configs"]}


def partial(address: str) -> dict[str, object]:
    """As lm-eval logs the prompts of MMLU-Pro; DanielKluev/pyFade, tests/data/eval_mmlu_pro_plus."""
    text = f"functools.partial(<function format_cot_example at {address}>, including_answer=False)"
    return configured(doc_to_text=text)


def test_equal_prompts_are_compared_whatever_the_template_says(tmp_path, capsys):
    first = asked(tmp_path, "base", FIRST, **partial("0x7fa8413c7a30"), versions={logs.TASK: 1.0})
    second = asked(
        tmp_path, "tuned", SECOND, **partial("0x7f0000000010"), versions={logs.TASK: 2.0}
    )
    found = compare([first, second])
    assert (found.others[0].slices[0].gained, found.others[0].slices[0].lost) == (GAINED, LOST)
    assert found.left_out == [0, 0]
    assert f"The versions of {logs.TASK} differ: 1.0 in lab/base, 2.0 in lab/tuned." in found.notes
    assert main(["race", "--replay", str(first), str(second), "-q"]) == 0
    assert f"The versions of {logs.TASK} differ" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("version", ["0.4.2", "0.4.13"])
@pytest.mark.parametrize("results", [True, False])
def test_other_prompts_are_refused_or_left_out_with_their_number(
    version, results, tmp_path, capsys
):
    """A stale cache of requests, lm-eval issue 4084; before 0.4.3 without hashes."""
    first = asked(tmp_path, "base", FIRST, version=version)
    second = asked(tmp_path, "tuned", SECOND, "Question: ", version=version)
    lines = entries(SECOND)[:50] + [
        logs.choices(i, bool(SECOND[i]), "Question: ") for i in range(50, N)
    ]
    mixed = logs.write(tmp_path, version, "mixed", lines)
    if not results:
        first, second, mixed = (
            logs.samples_file(logs.alone(run)) for run in (first, second, mixed)
        )
    for command in (["compare"], ["race", "--replay"]):
        assert main([*command, str(first), str(second)]) == 2
        assert "the runs used different prompts" in capsys.readouterr().err
        assert main([*command, str(first), str(mixed), "-q"]) == 0
        assert "10 of 60 documents are left out, as they had another prompt in" in " ".join(
            capsys.readouterr().out.split()
        )
    whole = compare([first, mixed]).others[0].slices[0]
    assert (whole.labelled, whole.accuracy) == (50, SECOND[:50].mean())
    assert compare_samples(first, mixed).other_prompts == 10
    with pytest.raises(MixedStoresError, match="in different prompts"):
        compare_samples(first, second)


def test_other_shots_are_refused_by_what_differs(tmp_path):
    first = asked(tmp_path, "base", FIRST)
    second = asked(tmp_path, "tuned", SECOND, "1 + 1 = 2. Q: ", **configured(num_fewshot=5))
    with pytest.raises(MixedStoresError, match=r"differ in num_fewshot \(0 and 5\)"):
        compare([first, second])


def test_a_chat_template_of_each_model_is_noted(tmp_path):
    chat = {"fewshot_as_multiturn": True}
    first = asked(tmp_path, "base", FIRST, "<user> ", chat_template_sha="a", **chat)
    second = asked(tmp_path, "tuned", SECOND, "[INST] ", chat_template_sha="b", **chat)
    found = compare([first, second])
    assert found.others[0].slices[0].gained == GAINED
    assert any("differ in chat_template (a and b)" in note for note in found.notes)
    same = asked(
        tmp_path, "base2", FIRST, "<user> ", chat_template_sha="a", model_name="lab/base", **chat
    )
    with pytest.raises(MixedStoresError, match="used different prompts"):
        compare([same, asked(tmp_path, "again", SECOND, "[INST] ", chat_template_sha="a", **chat)])


def test_documents_are_joined_by_what_they_are_not_by_their_numbers(tmp_path):
    """`--samples` out of order numbers documents wrongly: lm-eval issue 4084, pull request 4089."""
    lines = entries(SECOND)
    numbers = RNG.permutation(N)
    permuted = [
        {**line, "doc_id": int(number)} for line, number in zip(lines, numbers, strict=True)
    ]
    first = asked(tmp_path, "base", FIRST)
    second = logs.write(tmp_path, "0.4.13", "tuned", permuted)
    whole = compare([first, second]).others[0].slices[0]
    assert (whole.labelled, whole.gained, whole.lost) == (N, GAINED, LOST)
    found = compare_samples(first, second)
    assert (found.documents, found.gained, found.lost) == (N, GAINED, LOST)


def test_equal_documents_are_told_apart_by_their_numbers(tmp_path):
    twice = [logs.choices(i // 2, bool(FIRST[i])) | {"doc_id": i} for i in range(N)]
    other = [logs.choices(i // 2, bool(SECOND[i])) | {"doc_id": i} for i in range(N)]
    runs = [
        logs.write(tmp_path, "0.4.13", name, lines)
        for name, lines in (("base", twice), ("tuned", other))
    ]
    found = compare_samples(*runs)
    assert (found.documents, found.gained, found.lost) == (N, GAINED, LOST)
    assert compare(runs).others[0].slices[0].labelled == N


BROKEN: dict[str, tuple[Callable[[str], str | bytes], str]] = {
    "null metrics": (
        lambda line: line.replace('"metrics": ["acc"]', '"metrics": null'),
        "`metrics`",
    ),
    "a text for a score": (
        lambda line: line.replace('"acc": 1.0', '"acc": "one"'),
        "number for the metric acc",
    ),
    "a text for a log-probability": (lambda line: line.replace('"-0.5"', '"half"'), "does not fit"),
    "no answers": (
        lambda line: line.replace('"resps": [', '"resps": null, "x": ['),
        "does not fit",
    ),
    "answers of another type": (
        lambda line: line.replace('"filtered_resps": [', '"filtered_resps": 7, "x": ['),
        "`filtered_resps`",
    ),
    "arguments of another type": (
        lambda line: line.replace('"arguments": {', '"arguments": 7, "x": {'),
        "`arguments`",
    ),
    "a number that is none": (
        lambda line: line.replace('"doc_id": 4', '"doc_id": [4]'),
        "`doc_id`",
    ),
    "a number too large": (
        lambda line: line.replace('"doc_id": 4', f'"doc_id": {10**30}'),
        "`doc_id`",
    ),
    "a filter of another type": (
        lambda line: line.replace('"filter": "none"', '"filter": 3'),
        "`filter`",
    ),
    "no UTF-8": (lambda line: line.encode().replace(b"no", b"n\xff"), "is not UTF-8"),
    "cut off": (lambda line: line[:200], "is cut off"),
    "nested without end": (lambda line: "[" * 100_000, "is cut off"),
    "another document": (lambda line: line.replace("4 + 4", "5 + 4"), "doc_hash differs"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_line_that_does_not_fit_is_a_sentence_with_file_and_line(case, tmp_path, capsys):
    change, reason = BROKEN[case]
    run = logs.write(tmp_path, "0.4.13", "base", entries(np.ones(N, dtype=bool)))
    file = logs.samples_file(run)
    lines = file.read_text("utf-8").split("\n")
    changed = change(lines[4])
    lines[4] = "CHANGED"
    assert changed != lines[4]
    content = "\n".join(lines).encode()
    file.write_bytes(
        content.replace(b"CHANGED", changed if isinstance(changed, bytes) else changed.encode())
    )
    assert main(["audit", str(run)]) == 1
    error = capsys.readouterr().err
    assert f"{file}: line 5" in error
    assert reason in error


def test_a_damaged_archive_is_a_sentence(tmp_path):
    run = logs.zipped(logs.write(tmp_path, "0.4.13", "base", entries(FIRST)))
    file = next(run.rglob("samples_*.gz"))
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(HarnessError, match=r"samples_.*gz.*cannot be read"):
        read_logged(run)


def mutated(rng: random.Random, line: str) -> str | bytes:
    """A logged line with one change: of a value, of a key, of some characters or of some bytes."""
    values = [
        None,
        True,
        -1,
        0,
        10**400,
        1e400,
        float("nan"),
        "",
        "x",
        "\ud800",
        [],
        [[]],
        {},
        {"a": None},
        [None],
    ]
    kind = rng.randrange(4)
    content: Any
    if kind == 0:
        start = rng.randrange(len(line))
        return line[:start] + line[start + rng.randrange(1, 30) :]
    if kind == 1:
        content = bytearray(line.encode())
        content[rng.randrange(len(content))] = rng.randrange(256)
        return bytes(content)
    content = json.loads(line)
    places = [(content, key) for key in content]
    for parent, key in places:
        child = parent[key]
        if isinstance(child, dict):
            places += [(child, name) for name in child]
        elif isinstance(child, list):
            places += [(child, i) for i in range(len(child))]
    parent, key = rng.choice(places)
    if kind == 2 and isinstance(parent, dict):
        del parent[key]
    else:
        parent[key] = rng.choice(values)
    return json.dumps(content)


@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=pytest.mark.slow)])
def test_no_changed_results_file_ends_in_a_traceback(count, tmp_path):
    rng = random.Random(count)
    whole = []
    for name, lines in (("base", entries(FIRST)[:2]), ("tuned", [*logs.written(0, True, False)])):
        more = {
            "fewshot_as_multiturn": True,
            "chat_template_sha": "a",
            "model_name": "m",
            "task_hashes": {},
        }
        run = logs.write(
            tmp_path, "0.4.13", name, lines, **more, **{"n-samples": {logs.TASK: {"effective": 2}}}
        )
        whole.append((next(run.rglob("results_*")), json.dumps(logs.results(name, lines, **more))))
    refused = 0
    for _ in range(count):
        file, text = rng.choice(whole)
        content = mutated(rng, text)
        file.write_bytes(
            content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        )
        for read in (lambda file: read_logged(file), lambda file: read_accuracies(str(file))):
            try:
                read(file)
            except DispersionError:
                refused += 1
    assert refused


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_no_changed_line_ends_in_a_traceback(count, tmp_path):
    rng = random.Random(count)
    whole = {version: [] for version in VERSIONS}
    for version in VERSIONS:
        for entry in (logs.choices(0, True), *logs.written(0, True, False)):
            whole[version].append(json.dumps(logs.as_version(entry, version)))
    file = tmp_path / f"samples_sums_{logs.DATE}.jsonl"
    sentences = []
    for _ in range(count):
        line = mutated(rng, rng.choice(whole[rng.choice(VERSIONS)]))
        file.write_bytes(line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass"))
        for read in (read_logged, read_scores):
            try:
                read(file)
            except DispersionError as error:
                sentences.append(str(error))
    assert len(sentences) > count / 4
    assert all(str(file) in sentence for sentence in sentences)


STRICT = np.arange(N) % 10 == 0
FLEXIBLE = np.arange(N) % 5 > 0


def filtered(folder: Path, name: str, strict: np.ndarray, flexible: np.ndarray) -> Path:
    """Answers of free text that two filters judge: pmemoli/Data-Science-Thesis, gsm8k of phi-3-mini."""
    each = [logs.written(i, bool(strict[i]), bool(flexible[i])) for i in range(N)]
    return logs.write(
        folder, "0.4.9", name, [pair[0] for pair in each] + [pair[1] for pair in each]
    )


def test_filters_that_differ_are_said_first_and_can_be_named(tmp_path, capsys):
    first = filtered(tmp_path, "base", STRICT, FLEXIBLE)
    second = filtered(tmp_path, "tuned", STRICT, FLEXIBLE | (np.arange(N) > 30))
    named = ["--metric", "flexible-extract/exact_match", "-q"]
    expected = (
        f"{logs.TASK}: 10 % of the answers are right by the filter strict-match, 80 % by flexible-extract; "
        "--metric flexible-extract/exact_match"
    )
    assert main(["audit", str(first), "-q"]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(expected)
    assert main(["compare", str(first), str(second), "-q"]) == 0
    assert expected in " ".join(capsys.readouterr().out.split("\n\n")[0].split())
    assert main(["audit", str(first), *named]) == 0
    assert "80.0 % of 60 right" in capsys.readouterr().out
    whole = compare([first, second], metric="flexible-extract/exact_match").others[0].slices[0]
    assert (whole.gained, whole.lost) == (int((~FLEXIBLE)[31:].sum()), 0)
    assert main(["race", "--replay", str(first), str(second), *named, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoints"][1]["score"] == pytest.approx(0.8)
    assert "Raced by flexible-extract/exact_match." in found["notes"]
    for place in (first, logs.alone(first)):
        rated = read_accuracies(str(place), "flexible-extract/exact_match").rated
        assert rated[0].accuracy == pytest.approx(0.8)
        assert read_accuracies(str(place)).rated[0].accuracy == pytest.approx(0.1)


def scored(folder: Path, name: str, values: list[object], metric: str = "score") -> Path:
    """A task with a metric of its own: neulab/pace, acp_gen."""
    lines = []
    for i, value in enumerate(values):
        line = logs.choices(i, True)
        del line["acc"]
        lines.append({**line, "metrics": [metric], metric: value})
    return logs.write(folder, "0.4.13", name, lines)


def test_a_metric_of_any_name_and_range_can_be_named(tmp_path, capsys):
    x = RNG.normal(5, 2, N)
    y = x + RNG.normal(1, 1, N)
    first, second = scored(tmp_path, "base", x.tolist()), scored(tmp_path, "tuned", y.tolist())
    assert main(["audit", str(first), "-q", "--details"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "name one of their metrics by `--metric`: score" in text
    assert "no metric scores" not in text
    whole = compare([first, second], metric="score").others[0].slices[0]
    assert ttest_rel(y, x).pvalue < 1e-6
    assert 0 < whole.accuracy_low < (y - x).mean() < whole.accuracy_high
    assert (whole.accuracy, whole.accuracy_baseline) == (y.mean(), x.mean())
    assert main(["compare", str(first), str(second), "--metric", "score", "-q"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{y.mean():.4g} against {x.mean():.4g}" in text
    assert "%" not in text.split("shared documents")[0].replace("95 %", "")
    assert main(["race", "--replay", str(first), str(second), "--metric", "score"]) == 2
    assert "expected scores from 0 to 1" in capsys.readouterr().err


def test_of_a_metric_whose_lower_scores_are_better_the_worst_is_the_highest(tmp_path, capsys):
    direction = {"higher_is_better": {logs.TASK: {"brier": False}}}
    values = RNG.random((3, N)) / 2
    runs = []
    for name, scores in zip(("base", "tuned", "third"), values, strict=True):
        lines = [
            {**logs.choices(i, right=True), "metrics": ["brier"], "brier": s}
            for i, s in enumerate(scores)
        ]
        if name == "tuned":
            for line in lines[:15]:
                line["filtered_resps"] = [[float("nan"), False]] * 3
        runs.append(str(logs.write(tmp_path, "0.4.13", name, lines, **direction)))
    found = compare(runs, metric="brier")
    tuned = found.others[0].slices[0]
    assert tuned.not_finite == 15
    assert tuned.accuracy_as_wrong == pytest.approx((values[1, 15:].sum() + 15) / N)
    assert found.best is None  # the highest is not the best
    assert main(["race", "--replay", runs[0], runs[2], "--metric", "brier", "-q"]) == 2
    assert "expected a metric for which higher values are better" in capsys.readouterr().err


def test_metrics_of_all_documents_at_once_are_named_as_such(tmp_path, capsys):
    """885 of lm-eval 0.4.13's task files have bleu, logged as a pair of texts for each document."""
    first = scored(tmp_path, "base", [["a b", "a c"]] * N, "bleu")
    assert main(["audit", str(first), "-q", "--details"]) == 0
    assert "bleu is logged as pairs or lists" in " ".join(capsys.readouterr().out.split())
    assert main(["audit", str(first), "--metric", "bleu"]) == 1
    assert "bleu does not score single documents" in capsys.readouterr().err
    assert main(["audit", str(first), "--metric", "acc"]) == 1
    assert "name bleu" in capsys.readouterr().err


def test_verify_reads_what_others_read_and_refuses_other_shots(tmp_path):
    """EleutherAI/lm-evaluation-harness, branch with african_nlp_benchmarks: two numbers of shots."""
    for version in VERSIONS:
        place = tmp_path / version
        runs = pair(place, version)
        found = {rated.name: rated.accuracy for rated in read_accuracies(str(place)).rated}
        assert found == {"lab/base": FIRST.mean(), "lab/tuned": SECOND.mean()}
        file = logs.by_output_file(runs[0]) if not logs.before(version, "0.4.3") else runs[0]
        assert read_accuracies(str(file)).rated[0].accuracy == FIRST.mean()
        logs.alone(place)
        assert {rated.accuracy for rated in read_accuracies(str(place)).rated} == {
            FIRST.mean(),
            SECOND.mean(),
        }
    place = tmp_path / "shots"
    asked(place, "base", FIRST)
    asked(place, "tuned", SECOND, **configured(num_fewshot=5), **{"n-shot": {logs.TASK: 5}})
    with pytest.raises(UsageError, match=r"got 0-shot in .* and 5-shot in"):
        read_accuracies(str(place))
    same = {"task_hashes": {logs.TASK: "a"}}
    asked(place, "base", FIRST, **same)
    asked(place, "tuned", SECOND, **{"n-shot": {logs.TASK: 5}}, **same)
    assert len(read_accuracies(str(place)).rated) == 2


def own_scoring(i: int, right: bool, version: str) -> logs.Entry:
    """An answer whose `process_results` says which choices are right: truthfulqa_mc2, `doc_to_target: 0`."""
    line = {**logs.choices(i, right), "target": 0, "target_hash": logs.sha("0")}
    values = np.exp([answer[0] for answer in line["filtered_resps"]])
    true = [line["doc"]["gold"], (line["doc"]["gold"] + 2) % 3]
    if version == "mass":
        return {**line, "acc": float(values[true].sum() / values.sum())}
    return {**line, "acc": float(int(values.argmax()) in true)}


@pytest.mark.parametrize("kind", ["mass", "any of several"])
def test_a_probability_of_the_right_answer_needs_a_task_that_says_what_is_right(kind, tmp_path):
    runs = []
    for name, right in (("base", FIRST), ("tuned", SECOND)):
        lines = [own_scoring(i, bool(value), kind) for i, value in enumerate(right)]
        runs.append(logs.write(tmp_path, "0.4.13", name, lines))
    whole = compare(runs).others[0].slices[0]
    probability = read_logged(runs[0]).documents["probability"]
    if kind == "mass":
        scores = [own_scoring(i, bool(value), kind)["acc"] for i, value in enumerate(FIRST)]
        assert probability.tolist() == scores
        assert whole.probability_baseline == pytest.approx(np.mean(scores))
    else:
        assert probability.isna().all()
        assert np.isnan(whole.probability)


@pytest.mark.parametrize("metric", ["acc", "acc_norm"])
def test_the_probability_of_the_target_stays_where_it_is_what_lm_eval_scores(metric, tmp_path):
    lines = []
    for line in entries(FIRST):
        score = line.pop("acc")
        lines.append({**line, "metrics": [metric], metric: score})
    documents = read_logged(logs.write(tmp_path, "0.4.13", "base", lines)).documents
    for line, probability in zip(lines, documents["probability"], strict=True):
        values = np.exp([answer[0] for answer in line["filtered_resps"]])
        assert probability == pytest.approx(values[line["target"]] / values.sum())


def test_documents_of_one_prompt_are_several_where_their_content_differs(tmp_path, capsys):
    """Pages of images under one question, as in kevinschaul/llm-evals: the audit kept one of four."""
    lines = []
    for i, right in enumerate([True, False, True, False]):
        entry = logs.choices(i, right)
        entry["arguments"] = logs.choices(0, right)["arguments"]
        entry["prompt_hash"] = logs.choices(0, right).get("prompt_hash")
        lines.append(entry)
    run = logs.write(tmp_path, "0.4.13", "base", lines)
    assert main(["audit", str(run), "-q"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "50.0 % of 4 right" in text
    assert "repeated" not in text
