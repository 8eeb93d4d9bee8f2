"""The bundled demo family: whole, small, loadable, and what its table says is what it does."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from demo_measures import addition_accuracy
from lmeval_screener.tokens.resolution import resolve_tokens
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from safetensors import safe_open
from scipy.stats import spearmanr
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_dispersion.geometry import METRICS, between, within
from lmeval_dispersion.installation import data_folder

ROOT = Path(__file__).resolve().parent.parent
DEMO = data_folder("demo")
FAMILY = yaml.safe_load((DEMO / "family.yaml").read_text("utf-8"))
CHECKPOINTS = FAMILY["checkpoints"]
FOLDERS = [entry["folder"] for entry in CHECKPOINTS]
COMMONEST = 0.31  # accuracy of always taking the answer that is commonest among all sums


def files_of(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def resolution():
    vocabulary = Vocabulary.from_tokenizer_json((DEMO / FAMILY["tokenizer"]).read_bytes())
    return resolve_tokens(
        load_token_set("math"), load_token_set("reference-v1", "reference"), vocabulary
    )


def test_the_folders_of_the_table_are_there_small_and_share_one_tokenizer(resolution):
    """In a checkout one file that every folder links to; a wheel, which knows no links, holds copies."""
    assert sorted(FOLDERS) == sorted(path.name for path in DEMO.iterdir() if path.is_dir())
    for folder in FOLDERS:
        assert files_of(DEMO / folder) == files_of(DEMO / FOLDERS[0])
        assert (
            sum(path.stat().st_size for path in (DEMO / folder).glob("*.safetensors")) <= 1_500_000
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (DEMO / folder / name).resolve() == (DEMO / name).resolve()
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) <= 12_000_000
    assert [token.text for token in resolution.domain] == list("0123456789")
    assert FAMILY["training"]["resolved"] == {"domain": 10, "reference": len(resolution.reference)}


@pytest.mark.parametrize("entry", CHECKPOINTS, ids=FOLDERS)
def test_a_checkpoint_loads_and_its_gap_is_that_of_the_geometry(entry, resolution):
    """The script's plain distance matrix against the package's closed forms."""
    folder = DEMO / entry["folder"]
    with safe_open(folder / "model-00001-of-00002.safetensors", "pt") as file:
        assert set(file.keys()) == {"lm_head.weight", "model.norm.weight"}
        head = file.get_tensor("lm_head.weight")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.get_output_embeddings().weight, head)
    assert not torch.equal(model.get_input_embeddings().weight, head)
    assert head.shape[0] == len(tokenizer) == model.config.vocab_size
    for kind, number in (("bos", 0), ("eos", 1), ("pad", 2)):
        assert (
            getattr(tokenizer, f"{kind}_token_id")
            == getattr(model.config, f"{kind}_token_id")
            == number
        )
    rows = head.float().numpy().astype(np.float64)
    t, r = rows[resolution.domain_ids], rows[resolution.reference_ids]
    for metric in METRICS:
        expected = within(t, metric).mean + between(t, r, metric).mean
        assert entry["gap"][metric] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("folder", ["sums-45", "wrong-sums-45"])
def test_accuracy_is_measured_again(folder):
    """Other questions than those of the table, within four standard errors."""
    entry = CHECKPOINTS[FOLDERS.index(folder)]
    model = AutoModelForCausalLM.from_pretrained(DEMO / folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(DEMO / folder / "tokenizer.json"))
    again = addition_accuracy(model, tokenizer, questions=200, seed=1)
    recorded = entry["accuracy"]
    assert abs(again.mean - recorded["mean"]) < 4 * max(np.hypot(again.se, recorded["se"]), 0.01)
    assert (again.mean > COMMONEST + 4 * again.se) == (entry["answers"] == "right")


def decimals_of(page, begin):
    """The numbers with a point of the only line of a page that begins so."""
    (line,) = [line for line in page.splitlines() if line.startswith(begin)]
    return re.findall(r"\d+\.\d+", line)


def test_pages_hold_the_measured_table_and_the_spread_over_seeds():
    readme = (DEMO / "README.md").read_text("utf-8")
    page = (ROOT / "docs" / "explanation" / "demo.md").read_text("utf-8")
    rows = CHECKPOINTS + FAMILY["replicates"]
    for r in CHECKPOINTS:
        accuracy, gaps = r["accuracy"], [r["gap"][metric] for metric in METRICS]
        figures = [r["share"], accuracy["mean"], accuracy["se"], r["perplexity"], *gaps]
        digits = zip(figures, (2, 3, 3, 1, 3, 3), strict=True)
        assert decimals_of(readme, f"| {r['folder']} |") == [
            f"{value:.{places}f}" for value, places in digits
        ]
        same = [row for row in rows if row["folder"] == r["folder"]]
        spreads = [[row["accuracy"]["mean"] for row in same]]
        spreads += [[row["gap"][metric] for row in same] for metric in METRICS]
        expected = [f"{of(values):.3f}" for values in spreads for of in (np.mean, min, max)]
        assert decimals_of(page, f"| {r['folder']} |") == expected
    for seed in {row["seed"] for row in rows}:
        every = [row for row in rows if row["seed"] == seed]
        right = [row for row in every if row["answers"] == "right"]
        rhos = [
            spearmanr(
                [row["gap"][metric] for row in of], [row["accuracy"]["mean"] for row in of]
            ).statistic
            for of in (every, right)
            for metric in METRICS
        ]
        assert decimals_of(page, f"- seed {seed}: ") == [f"{rho:.2f}" for rho in rhos]
