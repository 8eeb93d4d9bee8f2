"""Two samples files of lm-eval compared with numpy alone."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest
from scipy.stats import t as student

from lmeval_dispersion import compare, compare_samples
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import HarnessError, MixedStoresError, UsageError
from lmeval_dispersion.installation import data_folder


def samples(
    path: Path, scores, *, metric="acc", filters=("none",), target="1", start=0, **more
) -> Path:
    """A file of lm-eval's with these scores, one a document; with several filters all but the first are 0."""
    lines = []
    for doc_id, score in enumerate(scores, start):
        for i, name in enumerate(filters):
            line = {
                "doc_id": doc_id,
                "doc": {"q": doc_id},
                "target": target,
                "arguments": [["q", "a"]],
            }
            line |= {"resps": [["0"]], "filtered_resps": ["0"], "filter": name, "metrics": [metric]}
            line |= {metric: 0.0 if i else score, **more}
            lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines), "utf-8")
    return path


def test_right_and_wrong_answers_are_those_of_scipy(tmp_path):
    rng = np.random.default_rng(0)
    x, y = (rng.random(300) < share for share in (0.5, 0.62))
    found = compare_samples(
        samples(tmp_path / "a", x.astype(float)), samples(tmp_path / "b", y.astype(float))
    )
    gained, lost = int((y & ~x).sum()), int((x & ~y).sum())
    assert (found.documents, found.gained, found.lost) == (300, gained, lost)
    assert (found.first, found.second) == (x.mean(), y.mean())
    assert found.difference == pytest.approx(y.mean() - x.mean())
    assert found.p == pytest.approx(binomtest(gained, gained + lost).pvalue)
    assert (found.low > 0) == (found.p < 0.05)
    assert found.low < found.difference < found.high
    assert found.metric == "none/acc"


def test_other_scores_are_compared_as_if_two_more_documents_had_changed_from_end_to_end(tmp_path):
    rng = np.random.default_rng(1)
    x, y = rng.random(40), rng.random(40)
    found = compare_samples(
        *(samples(tmp_path / n, s, metric="f1") for n, s in (("a", x), ("b", y)))
    )
    changes = np.append(y - x, [1, -1])
    half = student.ppf(0.975, 39) * changes.std() / np.sqrt(42)
    centre = changes.mean()
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half))
    assert found.p == pytest.approx(2 * student.sf(abs(centre) / (changes.std() / np.sqrt(42)), 39))
    assert (found.low > 0) == (found.p < 0.05)
    assert (found.gained, found.lost, found.metric) == (None, None, "none/f1")
    out = [samples(tmp_path / n, 100 * s, metric="f1") for n, s in (("a100", x), ("b100", y))]
    with pytest.raises(
        UsageError, match=r"^metric: expected scores from 0 to 1, got none/f1 scores from "
    ):
        compare_samples(*out)


def test_only_shared_documents_count_and_few_have_no_interval(tmp_path):
    a, b = samples(tmp_path / "a", [1.0] * 8), samples(tmp_path / "b", [0.0] * 9, start=4)
    found = compare_samples(a, b)
    assert (found.documents, found.left_out, found.difference) == (4, (4, 5), -1.0)
    assert all(map(math.isnan, (found.low, found.high, found.p)))
    with pytest.raises(MixedStoresError, match="share no document"):
        compare_samples(a, samples(tmp_path / "c", [1.0], start=99))


def test_a_named_filter_and_metric_judge(tmp_path):
    both = ("strict", "loose")
    a, b = (samples(tmp_path / name, [s] * 6, filters=both) for name, s in (("a", 0.0), ("b", 1.0)))
    assert compare_samples(a, b).difference == 1.0
    assert compare_samples(a, b, metric="loose/acc").difference == 0.0
    with pytest.raises(HarnessError, match=r"got 'f1'; name one of strict/acc, loose/acc"):
        compare_samples(a, b, metric="f1")
    with pytest.raises(HarnessError, match=r"got 'lose/acc'"):
        compare_samples(a, b, metric="lose/acc")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"doc": {"q": "x"}}, "differ in the documents or targets of 6 shared ids"),
        ({"target": "2"}, "differ in the documents or targets of 6 shared ids"),
        ({"doc_id": 1}, "another record of document 1"),
        ({"metrics": ["f1"], "f1": 1.0}, "got 'none/acc'"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, change, said):
    a, b = samples(tmp_path / "a", [1.0] * 6), samples(tmp_path / "b", [1.0] * 6, **change)
    with pytest.raises((HarnessError, MixedStoresError), match=said):
        compare_samples(a, b)


def test_a_file_that_is_not_there_or_cut_off_is_refused(tmp_path):
    a = samples(tmp_path / "a", [1.0] * 6)
    with pytest.raises(HarnessError, match=r"expected a score for each document"):
        compare_samples(samples(tmp_path / "b", [9.0] * 6, metric="perplexity"), a)
    with pytest.raises(HarnessError, match="does not exist; name a samples_TASK_DATE"):
        compare_samples(a, tmp_path / "none")
    (tmp_path / "cut").write_text(a.read_text()[:-9])
    with pytest.raises(HarnessError, match="line 6 is cut off"):
        compare_samples(tmp_path / "cut", a)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(HarnessError, match="is empty"):
        compare_samples(tmp_path / "empty", a)


def test_nothing_but_numpy_is_loaded(tmp_path):
    a, b = samples(tmp_path / "a", [1.0] * 6), samples(tmp_path / "b", [0.0] * 6)
    code = f"""
import sys
from lmeval_dispersion import compare, compare_samples
assert compare_samples({str(a)!r}, {str(b)!r}).lost == 6
print({{"pandas", "scipy", "sklearn", "pyarrow", "torch", "jinja2", "rich"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_demo_compares_two_runs_with_skill_accuracy_first(capsys):
    assert main(["compare", "--demo", "-q"]) == 0
    assert capsys.readouterr().out.startswith(
        "sums-30 answers more documents right than sums-20: 76.8 %"
    )
    page = compare(sorted(data_folder("demo_runs").glob("sums-*"))).to_html()
    assert (
        0
        < page.index("Δ accuracy</button><span class=")
        < page.index("Δ dispersion</button><span class=")
    )
    assert main(["compare", "--demo", "somewhere"]) == 2
    assert "leave out the runs or `--demo`" in capsys.readouterr().err


@pytest.mark.parametrize("lost", [3, 60])
def test_a_score_that_is_not_finite_is_left_out_and_counted(tmp_path, lost):
    rng = np.random.default_rng(2)
    x = (rng.random(200) < 0.5).astype(float)
    y = (rng.random(200) < 0.7).astype(float)
    y[:lost] = np.nan
    x[0] = np.nan
    found = compare_samples(samples(tmp_path / "a", x), samples(tmp_path / "b", y))
    gained, worse = int((y > x)[lost:].sum()), int((y < x)[lost:].sum())
    assert (found.documents, found.not_finite) == (200 - lost, lost)
    assert found.p == pytest.approx(binomtest(gained, gained + worse).pvalue)
    assert found.changes == (lost == 60)
    with pytest.raises(HarnessError, match="no document has a finite none/acc in both"):
        compare_samples(samples(tmp_path / "c", x), samples(tmp_path / "d", [math.nan] * 200))
