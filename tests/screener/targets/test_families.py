"""Families: the bundled ones, a file of one's own, and mistakes in it."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
from lmeval_screener.targets.families import load_families, load_family

from lmeval_dispersion.errors import UsageError

OWN = """
schema: 1
families:
  ours:
    note: Trained here.
    checkpoints:
      - {repo: ours/small, scale: 1B, kind: base}
      - {repo: ours/small, revision: "step*", scale: 1B, kind: trajectory}
      - {repo: ./folder, scale: 7B, kind: base}
      - {repo: "ours/quantised:Q4_K_M", scale: 7B}
      - {repo: "ours/quantised:Q8_0", scale: 7B}
"""


def size(scale: str) -> float:
    experts, number, unit = re.fullmatch(r"(?:(\d+)x)?([\d.]+)([MB])", scale).groups()
    return int(experts or 1) * float(number) * {"M": 1e6, "B": 1e9}[unit]


@pytest.mark.parametrize("name", load_families())
def test_bundled_families_are_well_formed(name):
    entries = load_family(name).checkpoints
    assert [size(entry.scale) for entry in entries] == sorted(
        size(entry.scale) for entry in entries
    )
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repo)
        assert entry.is_glob == name.endswith("-steps")
        assert entry.family == name


def test_trajectories_select_the_steps_that_their_notes_name():
    pythia = load_family("pythia-steps")
    revisions = [
        f"step{step}" for step in (0, *(2**i for i in range(10)), *range(1000, 144_000, 1000))
    ]
    (pattern,) = {entry.revision for entry in pythia.checkpoints}
    steps = [int(name[4:]) for name in revisions if fnmatchcase(name, pattern)]
    assert steps == list(range(3000, 143_001, 10_000))
    (seven,) = [entry for entry in load_family("olmo2-steps").checkpoints if entry.scale == "7B"]
    names = [f"stage1-step{step}-tokens{step // 238}B" for step in range(0, 928_000, 1000)]
    steps = [
        int(re.search(r"step(\d+)", name)[1]) for name in names if fnmatchcase(name, seven.revision)
    ]
    assert steps == list(range(100_000, 780_001, 20_000))  # 100,000 has no branch on the Hub
    assert set(range(120_000, 700_001, 20_000)) <= set(steps)
    olmo3 = load_family("olmo3-steps").checkpoints
    for entry, last, count in zip(olmo3, (1_413_814, 656_000), (28, 13), strict=True):
        names = [f"stage1-step{step}" for step in range(0, last + 1, 1000)]
        steps = [int(name[11:]) for name in names if fnmatchcase(name, entry.revision)]
        assert steps == list(range(50_000, 50_000 * count + 1, 50_000))
    (smollm3,) = load_family("smollm3-steps").checkpoints
    ends = {"stage1": 3_450_000, "stage2": 4_200_000, "stage3": 4_720_000}
    steps = []
    for step in range(40_000, 4_720_001, 40_000):
        stage = next(stage for stage, end in ends.items() if step <= end)
        if fnmatchcase(f"{stage}-step-{step}", smollm3.revision):
            steps.append(step)
    assert steps == list(range(200_000, 4_600_001, 200_000))


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "families.yaml"
    path.write_text(OWN)
    ours = load_family("OURS", path)
    assert (ours.note, ours.scales) == ("Trained here.", ("1B", "7B"))
    names = [entry.name for entry in ours.checkpoints]
    quantised = ["ours/quantised:Q4_K_M", "ours/quantised:Q8_0"]
    assert names == ["ours/small", "ours/small@step*", "./folder", *quantised]


def test_unknown_family():
    with pytest.raises(UsageError, match=r"unknown family 'qwn2\.5'; did you mean qwen2\.5"):
        load_family("qwn2.5")
    with pytest.raises(UsageError, match=r"unknown family 'nothing'; known: qwen2\.5, "):
        load_family("nothing")


@pytest.mark.parametrize(
    ("name", "leads"),
    [
        ("deepseek-r1-distill", "qwen2.5, llama3; give `--family qwen2.5`"),
        ("llama", "llama2, llama3; give `--family llama2`"),
        ("mixtral", "mistral-v0.1; give `--family mistral-v0.1`"),
        ("CodeLlama", "llama2; give `--family llama2`"),
        ("qwen1", "qwen1.5, qwen2.5; give `--family qwen1.5`"),
        ("Qwen/Qwen2.5-Math-7B", "qwen2.5; give `--family qwen2.5`"),
        ("qwen25", "qwen2.5; give `--family qwen2.5`"),
        ("bloomz", "bloom; give `--family bloom`"),
    ],
)
def test_a_name_that_is_no_family_leads_to_where_the_models_are(name, leads):
    with pytest.raises(UsageError) as error:
        load_family(name)
    assert f"models with this name are in {leads}; known: " in str(error.value)


@pytest.mark.parametrize("name", ["/", "falcon", "-"])
def test_a_name_that_no_model_holds_leads_nowhere(name):
    with pytest.raises(UsageError) as error:
        load_family(name)
    assert "models whose" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("families:", "familys:", "`familys`: expected one of the keys schema, families, rank_by"),
        ("    checkpoints:", "    models:", "`families.ours.models`: expected one of the keys"),
        ('revision: "step*", ', "", "checkpoints[1]`: expected each checkpoint once, got a string"),
        (
            "- {repo: ./folder, scale: 7B, kind: base}",
            "- o/x",
            "[2]`: expected a mapping, got a string",
        ),
    ],
)
def test_every_mistake_in_a_file_is_one_sentence(tmp_path, old, new, message):
    assert old in OWN
    path = tmp_path / "families.yaml"
    path.write_text(OWN.replace(old, new))
    with pytest.raises(UsageError) as error:
        load_families(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
