"""What every number of the laboratory means, and what it does not: for pages, tables and help texts."""

from __future__ import annotations

TITLES = {
    "law": "Perplexity law",
    "sublayers": "Choice of sub-layer",
    "condensation": "Condensation",
    "clusters": "Semantic clusters",
}

LEADS = {
    "law": "Do texts that the model finds easier lie further apart? A negative r says so.",
    "sublayers": "Which state of the block should key a kNN-LM: the one whose vectors lie further apart.",
    "condensation": "Do the tokens of a text point ever more the same way as they pass through the layers?",
    "clusters": "Contexts that go on with the same words: how far apart in a cluster, how far the clusters.",
}

# Column -> (heading, format, how to read it). What is not here is not shown in tables and pages.
COLUMNS: dict[str, tuple[str, str, str]] = {
    "model": ("Model", "", ""),
    "split": ("Text", "", ""),
    "perplexity_kind": ("Perplexity of", "", "sequence: the whole segment; last@c: the token after c tokens"),
    "layer": ("Layer", "", ""),
    "measure": ("Measure", "", ""),
    "segments": ("Segments", "d", ""),
    "texts": ("Texts", "d", ""),
    "depth": ("Depth", "", "0 is what enters the first block, the last one the final layer after its norm"),
    "pearson": ("Pearson r", "+.3f", "over bins; -1: easier bins are more dispersed, 0: no line"),
    "spearman": ("Spearman", "+.3f", "rank correlation"),
    "kendall": ("Kendall", "+.3f", "rank correlation"),
    "pearson_log": ("r of log perplexity", "+.3f", ""),
    "line_r2": ("R² of the line", ".3f", "of the line fitted on data; negative: worse than the mean"),
    "bins": ("Bins", "d", ""),
    "low": ("95 % from", ".4g", "bootstrap"),
    "high": ("to", ".4g", ""),
    "reason": ("", "", ""),
    "dispersion": ("Dispersion", ".4f", "mean cosine distance: 0 all parallel, 1 orthogonal on average"),
    "dispersion_se": ("± (jackknife)", ".4f", ""),
    "token_dispersion": ("Token dispersion", ".4f", "over the tokens of one text, averaged over texts"),
    "perplexity": ("Perplexity", ".2f", ""),
    "mean": ("Mean", ".4f", ""),
    "sd": ("SD over draws", ".4f", ""),
    "draws": ("Draws", "d", ""),
    "second": ("Second", "", ""),
    "difference": ("Difference", "+.4g", ""),
    "margin": (
        "Margin (SD)",
        ".2f",
        "difference over its SD; below about 2 the draws do not tell them apart",
    ),
    "draws_won": ("Draws won", "d", ""),
    "lowest_perplexity": ("Lowest kNN-LM perplexity", "", ""),
    "agrees": ("Agrees", "", ""),
    "keys": ("Keys", "d", ""),
    "base_perplexity": ("Model alone", ".3f", ""),
    "gain": ("Gain (nats a token)", ".4f", "over the model alone"),
    "gain_low": ("gain from", ".4f", ""),
    "gain_high": ("gain to", ".4f", ""),
    "weight": ("Weight of kNN", ".2f", ""),
    "temperature": ("Temperature", ".2g", "multiple of the median distance to the nearest key"),
    "first": ("First", "", ""),
    "last_mean": ("Mean of the last depths", ".4f", ""),
    "reference_mean": ("Mean as released", ".4f", "each token with itself included"),
    "reference_spearman": ("Spearman as released", "+.3f", ""),
    "clusters": ("Clusters", "d", ""),
    "within": ("Within", ".4f", "mean distance of members to their centroid"),
    "between": ("Between", ".4f", "mean pair distance of centroids"),
    "between_se": ("± (jackknife)", ".4f", ""),
    "ratio": ("Between / within", ".2f", ""),
    "ngram": ("N-gram", "", ""),
    "occurrences": ("Occurrences", "d", ""),
    "cluster": ("Cluster", "d", ""),
    "figure": ("Figure", "", ""),
    "paired": ("Paired", "", "whether both runs saw the same tokens"),
}

LIMITS = {
    "law": (
        "A correlation over bins of one model's texts, not a cause, and not a comparison of models. Bins "
        "average away most of what varies from text to text, so r says little about a single text. "
        "Algorithm 1 spreads the bins over the range of perplexity, so rare hard texts weigh as much as "
        "common ones. Dispersion compares a model with itself or its siblings only; tokenizers must match."
    ),
    "sublayers": (
        "Higher dispersion is a hint at the better key, not a proof; `--knn` measures. Draws come from one "
        "pool of segments, so their spread says how well a draw of that size is known, not what another "
        "corpus would give. A kNN-LM gains most on text that is like its datastore."
    ),
    "condensation": (
        "Similarity of raw states: a direction that all tokens share raises it, and a norm that removes it "
        "lowers it, without the model knowing more or less. The first token is often an outlier. Compare "
        "models on the same text; depth is ranked, so rho says whether the mean moves, not by how much."
    ),
    "clusters": (
        "Clusters are made of repeated phrases of this text: templates and headings, not meanings chosen by "
        "hand. Distances compare checkpoints of one tokenizer, and only those that moved from one start."
    ),
}
