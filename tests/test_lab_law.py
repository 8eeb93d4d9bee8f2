"""The perplexity law against a slow re-derivation: one text at a time, states as transformers gives them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_models
import torch

from lmeval_dispersion.errors import NonFiniteStateError, TooFewVectorsError, UsageError
from lmeval_dispersion.laboratory import law
from lmeval_dispersion.laboratory.study import as_texts
from lmeval_dispersion.model.loading import load_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LENGTH, BINS, SIZE, COUNT = 24, 5, 8, 90


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.saved(tmp_path_factory.mktemp("law") / "model", tiny_models.llama())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("law") / "text.jsonl"
    # Texts of very different difficulty: from one repeated word to noise.
    rows = [" ".join(f"w{rng.integers(1 + i)}" for _ in range(LENGTH)) for i in range(COUNT)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def result(model, data):
    return law(
        model,
        data,
        segment=LENGTH,
        bins=BINS,
        bin_size=SIZE,
        layers="all",
        contexts=(8, 99),
        held_out=data,
        batch=7,
    )


@pytest.fixture(scope="module")
def slow(model, data):
    """Per text: NLL of every token after the first, hidden states of every depth."""
    loaded = load_model(model)
    texts = []
    for text in as_texts(data):
        ids = torch.tensor([loaded.tokenizer(text.text).input_ids])
        with torch.no_grad():
            out = loaded.model(ids, output_hidden_states=True)
        logp = out.logits[0].double().log_softmax(-1)
        nll = -logp[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        texts.append((nll, [h[0].double().numpy() for h in out.hidden_states[1:]]))
    return texts


def mean_pair_distance(vectors):
    total = count = 0
    for i in range(len(vectors)):
        for j in range(i):
            a, b = vectors[i], vectors[j]
            total += 1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            count += 1
    return total / count


def expected_bins(values):
    """Sorted bins and the paper's choice of them, as loops."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    bins = [order[k * SIZE : (k + 1) * SIZE] for k in range(len(values) // SIZE)]
    means = [np.mean([values[i] for i in members]) for members in bins]
    chosen = set()
    for k in range(BINS):
        target = means[0] + k / (BINS - 1) * (means[-1] - means[0])
        chosen.add(min(range(len(means)), key=lambda j: abs(means[j] - target)))
    for j in range(len(means)):
        if len(chosen) < BINS:
            chosen.add(j)
    return [(j, bins[j]) for j in sorted(chosen)]


@pytest.mark.parametrize("kind", ["sequence", "last@8"])
def test_points_are_the_papers_procedure_in_slow_motion(result, slow, kind):
    values = [np.exp(nll.mean()) if kind == "sequence" else np.exp(nll[7]) for nll, _ in slow]
    position = -1 if kind == "sequence" else 7
    rows = result.points.query("perplexity == @kind and split == 'data'")
    assert rows["layer"].unique().tolist() == ["layer.0", "layer.1", "last"]
    for depth, layer in enumerate(["layer.0", "layer.1", "last"]):
        got = rows[rows["layer"] == layer]
        expected = expected_bins(values)
        assert got["bin"].tolist() == [j for j, _ in expected]
        for (_, members), row in zip(expected, got.itertuples(), strict=True):
            assert row.mean_perplexity == pytest.approx(np.mean([values[i] for i in members]), rel=1e-4)
            vectors = np.array([slow[i][1][depth][position] for i in members])
            assert row.dispersion == pytest.approx(mean_pair_distance(vectors), abs=1e-5)
            unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            p = np.linalg.eigvalsh(unit @ unit.T / len(unit))
            p = p[p > 1e-12]
            assert row.vendi_score == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-4)
            if kind == "sequence":
                tokens = np.mean([mean_pair_distance(slow[i][1][depth]) for i in members])
                assert row.token_dispersion == pytest.approx(tokens, abs=1e-5)


def test_correlations_are_those_of_the_points(result):
    for row in result.to_frame().query("measure == 'dispersion'").itertuples():
        points = result.points.query(
            "split == @row.split and perplexity == @row.perplexity and layer == @row.layer"
        )
        r = np.corrcoef(points["mean_perplexity"], points["dispersion"])[0, 1]
        assert row.pearson == pytest.approx(r, abs=1e-9)
        assert row.low <= row.pearson <= row.high
        # The second text is the first one here, so the line explains as much of it.
        assert row.line_r2 == pytest.approx(r**2, abs=1e-9)
    assert set(result.to_frame()["perplexity"]) == {"sequence", "last@8"}  # 99 does not fit into a segment


def test_the_overall_dispersion_is_that_of_all_texts(result, slow):
    for depth, row in enumerate(result.overall.query("split == 'data'").itertuples()):
        vectors = np.array([states[depth][-1] for _, states in slow])
        assert row.dispersion == pytest.approx(mean_pair_distance(vectors), abs=1e-5)
        assert row.texts == COUNT
        assert row.perplexity == pytest.approx(np.exp(np.mean([nll.mean() for nll, _ in slow])), rel=1e-5)


def test_batches_do_not_show(result, model, data):
    other = law(model, data, segment=LENGTH, bins=BINS, bin_size=SIZE, layers="all", contexts=(8,), batch=1)
    both = result.points.query("split == 'data'").reset_index(drop=True)
    assert np.allclose(both["dispersion"], other.points["dispersion"], atol=1e-5)
    assert np.allclose(both["mean_nll"], other.points["mean_nll"], atol=1e-5)


def test_diff_erank_is_that_of_each_text_averaged(model, data):
    found = law(model, data, segment=LENGTH, bins=3, bin_size=SIZE, contexts=(), diff_erank=True)
    loaded = load_model(model)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(loaded.model.config, dtype=torch.float32).eval()
    ids = torch.tensor([loaded.tokenizer(text.text).input_ids for text in as_texts(data)])
    with torch.no_grad():
        nll = torch.nn.functional.cross_entropy(
            loaded.model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        ).mean(1)
        hidden = [
            m(ids, output_hidden_states=True).hidden_states[-1].double().numpy()
            for m in (loaded.model, fresh)
        ]
    easiest = nll.argsort(stable=True)[:SIZE].tolist()

    def erank(x):
        z = x - x.mean(0)
        z = z[np.linalg.norm(z, axis=1) > 1e-9]
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        s = np.linalg.svd(z, compute_uv=False) ** 2
        p = s / s.sum()
        p = p[p > 1e-15]
        return np.exp(-(p * np.log(p)).sum())

    row = found.points.iloc[0]
    trained, untrained = (np.mean([erank(h[i]) for i in easiest]) for h in hidden)
    assert row["token_effective_rank"] == pytest.approx(trained, rel=1e-3)
    assert row["untrained_effective_rank"] == pytest.approx(untrained, rel=1e-3)
    assert row["diff_erank"] == pytest.approx(untrained - trained, rel=1e-3, abs=1e-3)


def test_too_little_and_too_long_is_told_before_the_work(model, data):
    with pytest.raises(TooFewVectorsError, match=r"one bin of 100 segments, got 90; pass more text"):
        law(model, data, segment=LENGTH)
    with pytest.raises(UsageError, match=r"takes at most 256 tokens, got segments of 512"):
        law(model, data)
    with pytest.raises(UsageError, match=r"at least 3 bins of at least 3 segments, got 2 of 100"):
        law(model, data, bins=2)
    with pytest.raises(UsageError, match=r"layers among last.*layer\.0 \.\.\. layer\.2.*got 'layer\.9'"):
        law(model, data, segment=LENGTH, bin_size=8, layers="layer.9")


def test_nan_states_name_layer_and_text(data):
    broken = tiny_models.llama()
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.saved(Path(folder) / "broken", broken)
        with pytest.raises(
            NonFiniteStateError, match=r"NaN or infinity at layer\.1 in text \d+ of .*text\.jsonl"
        ):
            law(path, data, segment=LENGTH, bins=3, bin_size=8, layers="all", contexts=())


def test_a_model_that_reads_both_ways_is_refused(data):
    class Peeking(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config, self.model, self.lm_head = (
                inner,
                inner.config,
                inner.model,
                inner.lm_head,
            )
            self.dtype = inner.dtype

        def forward(self, input_ids, **options):
            out = self.inner(input_ids=input_ids, **options)
            out.logits = out.logits + out.logits.mean(dim=1, keepdim=True)
            return out

    from lmeval_dispersion.model.loading import LoadedModel, ModelChoice

    inner = tiny_models.llama()
    loaded = LoadedModel(
        Peeking(inner), tiny_models.tokenizer(), "peeking", None, torch.device("cpu"), ModelChoice("peeking")
    )
    with pytest.raises(UsageError, match="left-to-right language model, got peeking"):
        law(loaded, data, segment=LENGTH, bins=3, bin_size=8)


def test_the_plot_holds_every_point(result):
    spec = result.plot().to_dict()
    values = next(iter(spec["datasets"].values()))
    assert len(values) == len(result.points)
