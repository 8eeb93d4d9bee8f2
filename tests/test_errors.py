"""One error, two languages: a command names its options, Python its arguments."""

import re

import pytest

import lmeval_dispersion as d
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.installation import data_folder

MODEL, RUN = str(data_folder("demo") / "sums-00"), str(data_folder("demo_run"))
TEXTS = "texts.txt"
DATA = f"{MODEL} --data {TEXTS}"


def shortlist(k, **options):
    return d.screen(demo=True).shortlist(k, **options)


# Words of a command, the same call in Python, the option and the argument.
ERRORS = [
    (f"calibrate {RUN} --where a>1 -o c.json", lambda: d.calibrate(RUN, where="a>1"), "where", "where"),
    (
        f"calibrate {RUN} --slice correct -o c.json",
        lambda: d.calibrate(RUN, by="correct"),
        "slice=cluster",
        "by='cluster'",
    ),
    (f"inspect law {DATA} --bins 1", lambda: d.law(MODEL, TEXTS, bins=1), "bins", "bins"),
    (
        f"inspect law {DATA} --bins 8 --segment 20",
        lambda: d.law(MODEL, TEXTS, bins=8, segment=20),
        "bin-size",
        "bin_size",
    ),
    (
        f"inspect condensation {DATA} --study .",
        lambda: d.condensation(MODEL, TEXTS, folder="."),
        "study",
        "folder",
    ),
    (f"inspect clusters {DATA}", lambda: d.clusters(MODEL, TEXTS), "occurrences", "occurrences"),
    ("screen --demo --registry no/r", lambda: d.screen(demo=True, registry="no/r"), "registry", "registry"),
    ("screen --demo --shortlist 0", lambda: shortlist(0), "shortlist", "k"),
    (
        "screen --demo --shortlist 1 --audit-sample -1",
        lambda: shortlist(1, audit_sample=-1),
        "audit-sample",
        "audit_sample",
    ),
]


@pytest.mark.parametrize(("words", "call", "option", "argument"), ERRORS, ids=[case[2] for case in ERRORS])
def test_a_command_names_the_option_and_python_the_argument(
    words, call, option, argument, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / TEXTS).write_text("12 + 30 = 42.\n\nIt was late.\n")
    assert main(words.split()) in (1, 2)
    shown = capsys.readouterr().err
    assert f"--{option}" in shown
    assert not re.search(r"\w=[ ,;]", shown)
    with pytest.raises(DispersionError) as caught:
        call()
    assert f"{argument}" in str(caught.value)
    assert "--" not in str(caught.value)


def test_only_known_options_are_arguments():
    error = UsageError("pass --force, --bin-size 50, --slice=cluster; lm-eval has --output_path")
    assert str(error) == "pass force=, bin_size=50, by='cluster'; lm-eval has --output_path"
