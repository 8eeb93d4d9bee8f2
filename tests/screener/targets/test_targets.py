"""Names that a user may write for a checkpoint: parsed, or explained without costing the others their run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_client import refused
from hypothesis import given
from hypothesis import strategies as st
from lmeval_screener import screen
from lmeval_screener.screening.selection import query_of
from lmeval_screener.targets.layouts import layout_of
from lmeval_screener.targets.names import Target, labelled, parse_name, parse_target, parse_targets
from lmeval_screener.targets.runs import run_and_step

from lmeval_dispersion.installation import data_folder


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("gpt2@main", "gpt2", "main"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("https://huggingface.co/org/name/", "org/name", None),
        ("https://huggingface.co/gpt2/tree/main", "gpt2", "main"),
        ("https://huggingface.co/org/name/tree/step%2F7", "org/name", "step/7"),
        ("https://huggingface.co/org/name/commit/0123abc?x=1#top", "org/name", "0123abc"),
        ("https://hub.example:8443/org/name/tree/v2", "org/name", "v2"),
        ("hf://models/org/name@v1/", "org/name", "v1"),
        ("x" * 5000, "x" * 5000, None),
        ("models:/name@champion", "models:/name@champion", None),
        *(
            (f"{scheme}://{rest}", f"{scheme}://{rest}", None)
            for scheme, rest in (
                ("s3", "bucket/run/checkpoint-*"),
                ("abfss", "box@account.dfs.core.windows.net/a b/m"),
                ("https", "example.com/m/model.safetensors"),
            )
        ),
    ],
)
def test_names_of_the_hub_and_addresses(monkeypatch, text, repo, revision):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.example:8443")
    target = parse_name(text)
    assert target == Target(repo, revision)
    assert target.on_hub == (":/" not in repo)
    assert target.on_hub or target.scheme == repo.partition(":")[0]


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", "BadName", "expected ORGANISATION/NAME"),
        ("org/na..me", "BadName", "expected"),
        ("org/name@", "BadName", "the revision after the @ is missing"),
        ("https://huggingface.co/datasets/org/name", "BadName", "about datasets, not a model"),
        (
            "https://huggingface.co/org/name/blob/main/config.json",
            "BadName",
            "checkpoint: org/name@main",
        ),
        ("https://huggingface.co/org/name/discussions", "BadName", "not show a whole revision"),
        ("https://huggingface.co/models?search=x", "BadName", "write 'ORG/*'"),
        ("https://[", "BadName", "expected"),
        ("hf://datasets/org/name", "BadName", "only whole model repositories"),
        ("hf://org/name/config.json", "BadName", "only whole model repositories"),
        ("s3://", "BadName", "a bucket or host after it"),
        ("://bucket", "BadName", "a valid scheme before"),
        ("https:///x/model.safetensors", "BadName", "host is missing"),
        ("hf://buckets/org/name", "BadName", "only whole model repositories"),
        ("https://huggingface.co/buckets/o/b/tree/x", "BadName", "about buckets, not a model"),
        ("models:/a/1/2", "BadName", "models:/NAME@ALIAS"),
        ("/nowhere/at/all", "FolderNotFound", "that folder does not exist"),
        ("C:\\models\\x", "FolderNotFound", "that folder does not exist"),
    ],
)
def test_a_text_that_means_nothing_is_explained(text, code, says):
    error = refused(parse_name, text)
    assert error.code == code
    assert says in str(error)


def test_folders_and_files(tmp_path, monkeypatch):
    for name in ("org/name", "a b", "x@y", "C:\\models"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("model.safetensors", "pytorch_model.bin", "tokenizer.json", "a.gguf"):
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "a b", "x@y", "C:\\models", "model.safetensors", "pytorch_model.bin"):
        assert parse_name(name) == Target(name, local=True), (
            "what exists wins over a repository's name"
        )
    assert parse_name("org/name/").local
    assert parse_name(f"file://{tmp_path}") == Target(str(tmp_path), local=True)
    assert parse_name("a.gguf") == Target(".", local=True, file="a.gguf")
    assert parse_name("s3://bucket/m/:Q4_K_M") == Target("s3://bucket/m", file="Q4_K_M")
    error = refused(parse_name, "tokenizer.json")
    assert error.code == "FolderNotFound"
    assert "give the folder" in str(error)
    (tmp_path / "list.txt").write_text("org/name")
    assert "`screen-checkpoints - < list.txt`" in str(refused(parse_name, "list.txt"))


@given(st.text(max_size=40))
def test_any_text_is_understood_or_explained(text):
    (target, *_) = parse_targets(text)
    assert target.refused or target.repo
    assert target.refused is None or target.refused[0] in ("BadName", "FolderNotFound")


def test_one_that_is_refused_fails_alone():
    good = str(data_folder("demo") / "sums-10")
    result = screen(["./nowhere", good, "https://["])
    assert [c.repo for c in result.checkpoints] == [good]
    assert [(f.repo, f.error) for f in result.failed] == [
        ("./nowhere", "FolderNotFound"),
        ("https://[", "BadName"),
    ]


def test_labels_name_no_more_than_what_differs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/one", "runs/two", "a/run/last", "b/run/last", "a.gguf"):
        (tmp_path / name).mkdir(parents=True)
    for names, labels in (
        ("a.gguf:Q4_0", "a.gguf:Q4_0"),  # a folder of that name
        ("models:/sums/2 models:/sums/1", "sums/2 sums/1"),
        ("models:/sums@champion models:/other/7", "sums@champion other/7"),
        ("runs/one runs/two org/name@v1", "one two org/name@v1"),
        ("a/run/last b/run/last", "a/run/last b/run/last"),
        ("s3://bucket/run/step-5 s3://bucket/run/step-10", "step-5 step-10"),
        ("org/name org/name@v1 org/name:Q8_0", "org/name org/name@v1 org/name:Q8_0"),
        ("https://host/a/m?signature=secret", "m"),
    ):
        targets = [parse_target(name) for name in names.split()]
        assert [target.label for target in labelled(targets)] == labels.split()


@given(
    st.lists(
        st.builds(
            Target,
            repo=st.sampled_from(
                ["m", "x/m", "y/m", "m/a.gguf", "s3://m", "s3://x/m", "models:/m/1", "."]
            ),
            revision=st.sampled_from([None, "v1"]),
            local=st.booleans(),
            file=st.sampled_from([None, "a.gguf", "Q8_0"]),
        ),
        unique=True,
    )
)
def test_no_two_checkpoints_of_a_report_share_a_label(targets):
    with_labels = labelled(targets)
    assert with_labels == targets
    assert len({target.label for target in with_labels}) == len(targets)


def make(folder, *files):
    folder.mkdir(parents=True)
    for name in files or ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")


@pytest.mark.parametrize(
    "expected",
    [
        ["checkpoint-20", "checkpoint-100"],  # Trainer and TRL
        ["checkpoint/step-5", "checkpoint/step-10"],  # torchtitan
        ["step_100/policy/weights"],  # NeMo RL
        ["checkpoints/epoch_0_step_9/consolidated"],  # NeMo AutoModel
        ["m--loss=1.2-step=999-consumed_samples=8"],  # NeMo 2.0
        ["iter_0000500_hf", "iter_0001000"],  # Megatron-LM, converted
        ["global_step_20/actor/huggingface", "global_step_100/actor/huggingface"],  # verl
        ["global_step100"],  # DeepSpeed
    ],
)
def test_a_run_is_its_checkpoints_in_the_order_of_their_steps(tmp_path, expected):
    run = tmp_path / "run1"
    for folder in expected:
        make(run / folder)
    targets = parse_targets(str(run))
    assert [target.repo for target in targets] == [str(run / name) for name in expected]
    assert all(target.local for target in targets)
    assert {run_and_step(target.repo)[0] for target in targets} == {str(run)}
    (run / "model.safetensors").write_text("")
    assert [target.repo for target in parse_targets(str(run))][len(expected) :] == [str(run)], (
        "the last"
    )


def test_a_runs_tokenizer_goes_to_a_race_for_a_checkpoint_that_stores_none(tmp_path):
    make(tmp_path / "run1" / "checkpoint-5")
    make(tmp_path / "run1" / "checkpoint-9", "config.json", "model.safetensors", "tokenizer.json")
    make(tmp_path / "run1" / "merged")
    make(tmp_path / "run1" / "tokenizer", "tokenizer.json")
    targets = parse_targets(str(tmp_path / "run1"))
    given = {Path(target.repo).name: target.arguments().get("tokenizer") for target in targets}
    source = str(tmp_path / "run1" / "tokenizer")
    assert given == {"checkpoint-5": source, "checkpoint-9": None, "merged": source}
    (alone,) = parse_targets(str(tmp_path / "run1" / "checkpoint-5"), "org/tokenizer")
    assert alone.arguments()["tokenizer"] == "org/tokenizer"


def test_a_step_by_its_own_name_shards_and_folders_that_are_no_run(tmp_path, monkeypatch):
    make(tmp_path / "run1" / "global_step_20" / "actor" / "huggingface")
    make(tmp_path / "run2" / "step_5" / "model", "shard-00001.safetensors")
    make(tmp_path / "run2" / "step_5" / "model" / "consolidated")
    make(tmp_path / "plain")
    make(tmp_path / "Step-3.5-flash")
    make(tmp_path / "empty", "README.md")
    monkeypatch.chdir(tmp_path)
    for name, expected in {
        "run1/global_step_20": "run1/global_step_20/actor/huggingface",
        "run2": "run2/step_5/model/consolidated",  # the joined weights, not the shards above them
        **{name: name for name in ("plain", "Step-3.5-flash", "empty")},
    }.items():
        assert [target.repo for target in parse_targets(name)] == [expected]
    assert run_and_step("plain") is None
    for folder, found in (
        ("run2", "step_5/model/consolidated"),
        ("run1/global_step_20", "actor/huggingface"),
    ):
        monkeypatch.chdir(tmp_path / folder)
        assert [target.repo for target in parse_targets(".")] == [found]


def test_a_glob_of_paths_is_what_matches_it(tmp_path, monkeypatch):
    for name in ("m1", "m10", "m2", "m11/checkpoint-5", "m11/checkpoint-10"):
        make(tmp_path / "many" / name, "model.safetensors")
    (tmp_path / "many" / "m1.txt").touch()
    (tmp_path / "many" / "a.gguf").touch()
    (tmp_path / "odd[1]").mkdir()
    monkeypatch.chdir(tmp_path)
    m1s = ["many/m1", "many/m10", "many/m11/checkpoint-5", "many/m11/checkpoint-10"]
    for text, labels in {
        "./many/m1*": m1s,
        "many/m1*": m1s,
        f"{tmp_path}/many/m?": [f"{tmp_path}/many/m1", f"{tmp_path}/many/m2"],
        "./many/*.gguf": ["many:a.gguf"],
        "./odd[1]": ["odd[1]"],
    }.items():
        assert [target.label for target in parse_targets(text)] == labels
        assert query_of(text) is None
    assert query_of("other/m1*") is not None
    (none,) = parse_targets("./none*")
    assert none.refused[0] == "FolderNotFound"


def test_a_programs_command_runs_on_a_copy_of_a_repository():
    refusal = layout_of(["zero_to_fp32.py"], "org/name", is_local=False)
    assert refusal is not None
    assert refusal[2].startswith(
        "download it: `hf download org/name --local-dir FOLDER`; then join them: `cd FOLDER && python"
    )
    vllm = layout_of(["model-rank-0-part-0.safetensors"], "org/name", is_local=False)
    assert vllm is not None
    assert "download" not in vllm[2]
