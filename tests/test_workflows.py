"""The Action and the workflows: words of an input stay words, and what they run is pinned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lmeval_dispersion.installation import data_folder

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "action.yml", *sorted((ROOT / ".github" / "workflows").glob("*.yml"))]


def steps(content):
    """All steps of a workflow or an action."""
    parts = [content["runs"]] if "runs" in content else content["jobs"].values()
    return [step for part in parts for step in part["steps"]]


@pytest.fixture
def action(tmp_path):
    """Runs the action's script with a stand-in for ``uvx``: this tree's command, whose words it keeps."""
    (script,) = [
        step["run"] for step in steps(yaml.safe_load(FILES[0].read_text("utf-8"))) if "run" in step
    ]
    binaries = tmp_path / "bin"
    binaries.mkdir()
    stub = binaries / "uvx"
    stub.write_text(
        "#!/bin/sh\nprintf '%s\\n' \"$@\" >> calls\necho >> calls\nshift 3\n"
        f'exec "{sys.executable}" -m lmeval_screener "$@"\n'
    )
    stub.chmod(0o755)
    (binaries / "python3").symlink_to(sys.executable)

    def run(checkpoints, **inputs):
        for name in ("calls", "summary", "output"):
            (tmp_path / name).unlink(missing_ok=True)
        names = ("TASK", "DOMAIN", "BASE", "GATE", "REGISTRY", "SINCE", "VERSION")
        env = {**os.environ, **dict.fromkeys(names, ""), "OUTPUT": "screening.json", **inputs}
        env |= {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "CHECKPOINTS": checkpoints,
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
        }
        command = ["bash", "-eo", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, timeout=120, capture_output=True, text=True
        )
        lines = (tmp_path / "output").read_text("utf-8").splitlines()
        outputs = dict(line.split("=", 1) for line in lines)
        summary = tmp_path / "summary"
        return done, outputs, summary.read_text("utf-8") if summary.exists() else ""

    return run


def test_a_word_of_checkpoints_is_never_an_option(action, tmp_path):
    given = "org/a --output=/etc/x\n-o $(touch pwned)"
    _, outputs, summary = action(
        given, TASK="--output", BASE="org/b", REGISTRY="r.db", SINCE="last"
    )
    assert not (tmp_path / "pwned").exists()
    (call,) = [call.splitlines() for call in (tmp_path / "calls").read_text().strip().split("\n\n")]
    at = call.index("--")
    assert call[at + 1 :] == ["org/a", "--output=/etc/x", "-o", "$(touch", "pwned)"]
    assert [word.partition("=")[0] for word in call[3:6]] == ["--output"] * 3
    assert call[3] == "--output=screening.json"
    assert call[6:at] == ["--task=--output", "--base=org/b", "--registry=r.db", "--since=last"]
    # No task is called so: wrong usage, without a report.
    assert outputs == {
        "worth-evaluating": "false",
        "worth": "[]",
        "below": "[]",
        "failed": "[]",
        "status": "2",
    }
    assert summary == ""


def test_a_failed_gate_is_said_in_the_log_the_summary_and_the_outputs(action, tmp_path):
    high, low = (str(data_folder("demo") / name) for name in ("sums-80", "sums-00"))
    done, outputs, summary = action(f"{low} {tmp_path / 'none'}", GATE=high)
    assert done.returncode == 4
    assert done.stdout.startswith("Failed: sums-00 (ratio lower by ")
    assert "\n**Failed: sums-00 (ratio lower by " in summary
    assert len((tmp_path / "calls").read_text().strip().split("\n\n")) == 1
    assert (outputs["status"], json.loads(outputs["below"])) == ("4", ["sums-00"])
    assert json.loads(outputs["failed"]) == [str(tmp_path / "none")]
    passed, outputs, summary = action(high, GATE=low)
    assert (passed.returncode, outputs["status"]) == (0, "0")
    assert "\n**Passed: sums-80 (ratio higher by " in summary


def test_the_nights_news_are_the_summary_and_names_are_outputs(action, tmp_path):
    names = [str(data_folder("demo") / name) for name in ("sums-20", "sums-30", "sums-80")]
    given = {"REGISTRY": "nightly.db", "SINCE": "last"}
    action(" ".join(names[:2]), **given)
    done, outputs, summary = action(" ".join([*names, str(tmp_path / "none")]), **given)
    assert done.returncode == 0
    assert "Worth evaluating" in done.stdout
    assert "**Worth evaluating" in summary
    assert (outputs["status"], outputs["worth-evaluating"]) == ("5", "true")
    assert json.loads(outputs["worth"]) == [names[2]]
    assert json.loads(outputs["failed"]) == [str(tmp_path / "none")]
    _, outputs, summary = action(" ".join(names), **given)
    assert (outputs["worth"], "no changes" in summary) == ("[]", True)


def test_the_action_and_the_image_have_what_the_nightly_job_reads():
    for name in ("action.yml", "Dockerfile"):
        (extras,) = re.findall(
            r"(?:lmeval-dispersion|whl\))\[([\w,]+)\]", (ROOT / name).read_text("utf-8")
        )
        assert {"html", "gguf", "cloud", "mlflow"} <= set(extras.split(",")), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_actions_are_pinned_by_commit_and_keep_no_credentials(file):
    text = file.read_text("utf-8")
    for used in re.findall(r"uses: (.*)", text):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), used
    for step in steps(yaml.safe_load(text)):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
