"""The command `screen-checkpoints` against the loopback Hub."""

from __future__ import annotations

import asyncio
import csv
import functools
import io
import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from checkpoints import slow_gap, write_checkpoint, write_qwen_7b
from hub_faults import stalled, status
from lmeval_screener.reading import Reader
from lmeval_screener.screening.run import TIMEOUT
from lmeval_screener.tokens.resolution import resolve_tokens
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary

TOKENIZERS = Path(__file__).parent.parent / "data" / "tokenizers"
QWEN, GPT2 = ((TOKENIZERS / f"{name}.json").read_bytes() for name in ("qwen2.5", "gpt2"))


@functools.cache
def ids_of(tokenizer):
    sets = load_token_set("math"), load_token_set("reference", "reference")
    found = resolve_tokens(*sets, Vocabulary.from_tokenizer_json(tokenizer))
    return found.domain_ids, found.reference_ids


def rows_for(tokenizer, d, seed, spread):
    """Rows whose domain tokens share a direction the less, the larger ``spread`` is, as BF16 holds them."""
    ids = ids_of(tokenizer)
    draw, noise = np.random.default_rng(0), np.random.default_rng(seed + 1)
    domain, reference = (draw.normal(size=(len(part), d)) for part in ids)
    domain = spread * domain + 1.0 + 0.01 * noise.normal(size=domain.shape)
    values = np.concatenate([domain, reference]).astype("<f4").view("<u4") >> 16 << 16
    rows = dict(zip([*ids[0], *ids[1]], values.astype("<u4").view("<f4")[:, None], strict=True))
    return rows, slow_gap(*([rows[i] for i in part] for part in ids))


@pytest.fixture
def command(hub, in_process):
    """Runs the command against the loopback Hub."""
    return functools.partial(in_process, endpoint=hub.endpoint)


@pytest.fixture
def small(hub, tmp_path):
    """Adds a small checkpoint to the Hub: ``small(name, spread)``; its G."""

    def add(name, spread, *, tokenizer=QWEN, branch="main", d=16, folder=None):
        place = tmp_path / "repos" / (folder or f"{name}-{branch}".replace("/", "--"))
        rows, gap = rows_for(tokenizer, d, len(hub.repositories), spread)
        matrix = np.random.default_rng(3).normal(size=(max(rows) + 10, d))
        matrix[list(rows)] = np.concatenate(list(rows.values()))
        tensors = {"lm_head.weight": ("F32", matrix), "model.norm.weight": ("F32", np.ones(d))}
        write_checkpoint(place, tensors, tokenizer=tokenizer)
        hub.add(name, place, branch=branch)
        return gap

    return add


def seven_billion(hub, tmp_path, name, seed, spread):
    """A checkpoint with Qwen2.5-7B's true shapes under a name of the bundled family; its G."""
    rows, gap = rows_for(QWEN, 3584, seed, spread)
    place = write_qwen_7b(tmp_path / "repos" / name.replace("/", "--"), rows=rows)
    (place / "tokenizer.json").write_bytes(QWEN)
    hub.add(name, place, parameters=7_615_616_512)
    return gap


def test_the_main_job_on_true_7b_shapes_reads_only_what_it_needs(hub, tmp_path, command):
    names = {"Qwen/Qwen2.5-7B": 0.5, "Qwen/Qwen2.5-Math-7B": 1.0, "Qwen/Qwen2.5-Coder-7B": 1.0}
    gaps = {
        name: seven_billion(hub, tmp_path, name, seed, spread)
        for seed, (name, spread) in enumerate(names.items())
    }
    done = command("--family", "qwen2.5", "--domain", "math", "--format", "json")
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    found = {c["repo"]: c for c in document["checkpoints"]}
    assert set(found) == set(names)
    assert {f["error"] for f in document["failed"]} == {"RepoNotFound"}
    for name, gap in gaps.items():
        c = found[name]
        assert c["gap"]["cosine"]["mean"] == pytest.approx(gap, abs=1e-9)
        assert (c["family"], c["scale"], c["tensor"]["shape"]) == ("qwen2.5", "7B", [152064, 3584])
        assert c["bytes_read"] < 1.3 * (115 * 7168 + 8160 + 30_000) + len(QWEN)
        assert len(c["revision"]) == 40
    ranks = {name: c["rank"] for name, c in found.items()}
    assert ranks["Qwen/Qwen2.5-7B"] == 3
    assert found["Qwen/Qwen2.5-7B"]["holds_best"] is None  # by G
    assert not [r for r in hub.seen("cdn") if "authorization" in {key.lower() for key in r.headers}]

    # The second run asks for the revisions only; offline it asks for nothing, and says the same.
    before = len(hub.requests)
    again = json.loads(command("--family", "qwen2.5", "--format", "json").stdout)
    assert {c["repo"]: c["gap"] for c in again["checkpoints"]} == {
        n: c["gap"] for n, c in found.items()
    }
    served = [
        r for r in hub.requests[before:] if any(f"/{name}/" in f"{r.path}/" for name in names)
    ]
    assert {r.part for r in served} == {"resolve"}
    before = len(hub.requests)
    offline = command(*names, "--format", "json", offline=True)
    assert offline.returncode == 0, offline.stdout
    assert len(hub.requests) == before
    offline = json.loads(offline.stdout)
    assert {c["repo"]: c["gap"] for c in offline["checkpoints"]} == {
        n: c["gap"] for n, c in found.items()
    }
    assert offline["totals"]["requests"] == 0


def test_checkpoints_by_name_are_grouped_by_tokenizer_and_scale_over_a_domain_of_ones_own(
    command, small, tmp_path
):
    for name, spread, options in (
        ("org/a", 1.0, {}),
        ("org/b", 0.5, {}),
        ("org/other-tokenizer", 0.7, {"tokenizer": GPT2}),
        ("org/larger", 0.7, {"d": 256}),
    ):
        small(name, spread, **options)
    (tmp_path / "low-digits.yaml").write_text(
        "schema: 1\nname: low-digits\nrole: domain\ndefault_groups: [digits]\nmin_tokens: 5\ngroups:\n"
        "  digits: {variant: bare, case: exact, items: ['0', '1', '2', '3', '4', '5']}\n"
    )
    names = ("org/a", "org/b", "org/other-tokenizer", "org/larger")
    done = command(*names, "--domain", "low-digits.yaml", "--format", "json")
    assert done.returncode == 0, done.stderr
    document, groups = json.loads(done.stdout), {}
    for c in document["checkpoints"]:
        groups.setdefault((c["family"], c["scale"]), []).append((c["rank"], c["repo"]))
    assert sorted(map(tuple, groups.values())) == [
        ((1, "org/a"), (2, "org/b")),
        ((1, "org/larger"),),
        ((1, "org/other-tokenizer"),),
    ]
    assert all(family.startswith("tokenizer:") for family, _ in groups)
    assert document["domain"] == "low-digits"
    assert {c["tokens"]["domain"] for c in document["checkpoints"]} == {6}


def test_a_family_is_ranked_on_the_tokens_of_all_and_without_other_tokenizers(
    command, small, tmp_path, monkeypatch
):
    lacking = json.loads(QWEN)
    del lacking["model"]["vocab"]["Ġkitchen"]
    for name, tokenizer in (
        ("org/a", json.dumps(lacking).encode()),
        ("org/b", QWEN),
        ("org/c", GPT2),
    ):
        small(name, 1.0, tokenizer=tokenizer)
    families = tmp_path / "mine.yaml"
    entries = "".join(f"      - {{repo: org/{x}, scale: 1B, kind: base}}\n" for x in "abc")
    families.write_text(f"schema: 1\nfamilies:\n  ours:\n    checkpoints:\n{entries}")
    done = command("--family", f"{families}:ours", "--format", "json")
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    tokens = {c["repo"]: c["tokens"] for c in document["checkpoints"]}
    assert set(tokens) == {"org/a", "org/b"}
    assert {t["reference"] for t in tokens.values()} == {104}
    assert all("kitchen" in t["dropped"] for t in tokens.values())
    (failed,) = document["failed"]
    assert (failed["repo"], failed["error"]) == ("org/c", "TokenizerMismatch")
    assert "differs from that of org/a" in failed["message"]

    def interrupted(reader, target, account, *, over=None):
        if over is None:
            return read(reader, target, account)
        signal.raise_signal(signal.SIGINT)
        return asyncio.sleep(60)

    # Ctrl-C while a checkpoint is read once more, over the common tokens: the others stay.
    read = Reader.read
    monkeypatch.setattr(Reader, "read", interrupted)
    document = json.loads(command("--family", f"{families}:ours", "--format", "json").stdout)
    assert [c["repo"] for c in document["checkpoints"]] == ["org/a"]
    errors = {failed["repo"]: failed["error"] for failed in document["failed"]}
    assert errors == {"org/b": "Interrupted", "org/c": "TokenizerMismatch"}


def test_a_training_run_is_printed_in_step_order(command, small, hub, tmp_path):
    spreads = {"step_1000": 0.3, "step_200": 0.2, "step_30000": 0.8}
    gaps = {
        name: small("org/run", spread, branch=name, folder=f"run/{name}")
        for name, spread in spreads.items()
    }
    small("org/run", 2.0)
    (tmp_path / "repos" / "run" / "runs").mkdir()
    names = ["step_200", "step_1000", "step_30000"]
    for run, endpoint in (("org/run@step*", hub.endpoint), ("repos/run", "http://127.0.0.1:9")):
        done = command(run, endpoint=endpoint)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("run: Ratio rises from ")
        assert " at step_200 to " in done.stdout
        lines = [
            line.split() for line in done.stdout.splitlines() if re.match(r" +\d +step_", line)
        ]
        assert [line[:2] for line in lines] == [["3", names[0]], ["2", names[1]], ["1", names[2]]]
        assert [float(line[-1]) for line in lines] == pytest.approx(
            [gaps[name] for name in names], abs=1e-3
        )
    assert command("repos/run", "--shortlist", "1").stdout == "repos/run/step_30000\n"


def test_one_bad_checkpoint_stops_no_other(command, small, hub, monkeypatch):
    for name in ("org/a", "org/b", "org/c"):
        small(name, 1.0)
    hub.fault("cdn", status(500), match="*org/b*")
    hub.fault("*", stalled(60), match="*org/c*")
    monkeypatch.setenv(TIMEOUT, "soon")
    assert f"{TIMEOUT}: expected a number of seconds above 0, got 'soon'" in command("org/a").stderr
    monkeypatch.setenv(TIMEOUT, "3")
    done = command("org/a", "org/b", "org/c")
    assert done.returncode == 3
    assert "org/a" in done.stdout
    assert "Not screened" in done.stdout
    text = " ".join(done.stdout.split())
    assert "org/b ServerError" in text or "org/b Timeout" in text
    assert "org/c Timeout" in text
    assert done.stdout.startswith("2 of 3 checkpoints could not be screened (")
    assert "Only org/a (ratio " in text


def test_a_dead_hub_stops_the_run_early(command):
    names = [f"org/m{i}" for i in range(40)]
    done = command(*names, "--format", "json", endpoint="http://127.0.0.1:9")
    document = json.loads(done.stdout)
    assert (done.returncode, {f["error"] for f in document["failed"]}) == (1, {"Unreachable"})
    assert len(document["failed"]) == 40
    assert document["totals"]["requests"] < 40
    assert (
        sum(
            f["message"].startswith("not tried, because 3 other checkpoints could not be reached")
            for f in document["failed"]
        )
        == 37
    )
    nothing = command(*names, endpoint="http://127.0.0.1:9")
    assert (nothing.returncode, nothing.stdout, nothing.stderr.count("\n")) == (1, "", 1)
    assert (
        "none of the 40 checkpoints could be screened (40 Unreachable); the first: "
        in nothing.stderr
    )


def test_a_wrong_file_of_accuracies_costs_no_request(command, hub, tmp_path):
    (tmp_path / "wrong.csv").write_text("repo,accuracy\norg/x,10\n")
    done = command("org/a", "--accuracy", "wrong.csv")
    assert (done.returncode, done.stdout) == (2, "")
    assert "got 'org/x'; did you mean org/a?" in done.stderr
    assert not hub.requests


def test_formats_a_short_list_for_a_pipe_and_the_suffix_of_output(command, small, tmp_path):
    pytest.importorskip("vl_convert")
    gaps = {
        name: small(name, spread)
        for name, spread in (("org/a", 1.0), ("org/b", 0.2), ("org/c", 0.6))
    }
    rows = list(csv.DictReader(io.StringIO(command(*gaps, "--format", "csv").stdout)))
    assert {row["repo"]: float(row["gap_cosine"]) for row in rows} == pytest.approx(gaps, abs=1e-6)
    assert [row["rank"] for row in rows] == ["1", "2", "3"]
    assert "| 1 | ▶ org/a |" in command(*gaps, "--format", "markdown").stdout
    done = command(*gaps, "org/none", "--shortlist", "2")
    assert (done.returncode, done.stdout) == (3, "org/a\norg/c\n")
    assert "org/none" in done.stderr
    assert ": 2 of 3: ranks 1–2\n" in done.stderr  # beside the pipe
    for options, name, begin, printed in (
        ((), "page.html", "<!DOCTYPE html>", "Evaluate first: org/a, org/c "),
        (("--quiet",), "quiet.html", "<!DOCTYPE html>", ""),
        (("--shortlist", "1"), "b.txt", "org/a\n", ""),
        (
            ("--shortlist", "1", "-o", tmp_path / "b.md"),
            "both.txt",
            "org/a\n",
            "Evaluate first: org/a ",
        ),
    ):
        done = command(*gaps, *options, "--output", tmp_path / name)
        assert done.returncode == 0
        assert done.stdout.startswith(printed)
        assert bool(done.stdout) == bool(printed)
        assert (tmp_path / name).read_text().startswith(begin)
    assert "Short list: 1 of 3" in (tmp_path / "b.md").read_text()
    # Files say what failed where nothing could be screened; the terminal has the sentence once.
    done = command("org/none", "-o", tmp_path / "none.md")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("screen-checkpoints: org/none: RepoNotFound")
    assert "RepoNotFound" in (tmp_path / "none.md").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "expected a checkpoint, got none; name a folder of checkpoints"),
        (("--family", "qwen"), "qwen2.5"),
        (("org/a", "--domain", "maths"), "math"),
        (("org/a", "--shortlist", "0"), "--shortlist: expected at least 1"),
        (
            ("org/a", "--shortlist", "1", "--audit-sample", "-1"),
            "--audit-sample: expected at least 0",
        ),
        (("org/a", "--audit-sample", "3"), "--audit-sample: needs --shortlist"),
        (
            ("--shortlist", "org/a"),
            "expected a number of ranks, got 'org/a'; put the checkpoints before",
        ),
        (("org/a", "--tasks", "mine,gsm8q"), "the task 'mine' has no bundled answer tokens"),
        (("org/a", "--task", "gsm8k", "--tasks", "mmlu"), "expected --tasks once, got it twice"),
        (("--family", "x.yaml:ours"), "x.yaml"),
    ],
)
def test_wrong_usage_is_exit_2_with_the_next_step(command, args, message):
    done = command(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_families_domains_and_the_version_are_told(command):
    families = command("--list", "families").stdout
    assert re.search(r"^qwen2.5 +36 .* G \(Euclidean\) ", families, re.M)
    rows = csv.DictReader(io.StringIO(command("--list", "domains", "--format", "csv").stdout))
    taken = {(row["set"], row["group"]): row["default"] for row in rows}
    assert (taken["math", "digits"], taken["math", "operators"]) == ("True", "False")
    rows = csv.DictReader(io.StringIO(command("--list", "tasks", "--format", "csv").stdout))
    refused = {row["set"]: row["refused"] for row in rows}
    assert (refused["mmlu"], refused["hellaswag"]) == ("", "its choices are whole sentences")
    tasks = command("--list", "tasks").stdout
    assert re.search(r"^3 of \d+ sets have answer tokens; ", tasks)
    (code,) = [line for line in tasks.splitlines() if line.startswith("humaneval ")]
    examples = re.search(r"567 +((?:\S+ )+)", code)[1].split()
    assert len(examples) == len(set(examples))
    assert command("--version").stdout.startswith("lmeval-dispersion ")
