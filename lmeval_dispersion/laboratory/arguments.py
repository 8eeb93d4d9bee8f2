"""The options of ``dispersion inspect`` and of its four measures; this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lmeval_dispersion.arguments import Option

if TYPE_CHECKING:
    from lmeval_dispersion.model.loading import ModelLike
    from lmeval_dispersion.model.texts import DataLike

Control = Literal["untrained", "shuffled"]
#: Parts of a text for a kNN-LM, as shares of its segments.
PARTS = {"datastore": 0.8, "tune": 0.1, "test": 0.1}
NEIGHBOURS = 1024
# With 6 bins, an interval of r = -0.95 excludes 0 in 6 of 100 studies; with 8 in 97.
FEWEST_BINS = 8


def _share_or_text(text: str) -> float | str:
    """A share such as 0.2, or the name of a text."""
    try:
        return float(text)
    except ValueError:
        return text


# Making each declaration compiles its methods, also for `--help`: none compares or prints one.
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StudyOptions:
    """The settings that every measure of ``dispersion inspect`` takes.

    Attributes:
        segment: Number of tokens in a segment or context.
        pack: Join all texts into one before cutting segments (a .txt file is always one text).
        seed: Seed of the draws, the bootstrap and the random weights.
        batch: Number of segments in one forward pass. Default: as many as fit into memory, at
            most 64.
        folder: Folder for finished work, from which the same command resumes. Default: in the
            user's cache.

            In Python the default is a temporary folder, which is deleted at the end.
        quiet: Print no progress and no remarks on standard error.
    """

    segment: Annotated[int, Option("TOKENS")] = 512
    pack: bool = False
    seed: Annotated[int, Option("N", least=0)] = 0
    batch: Annotated[int | None, Option(least=1)] = None
    folder: Annotated[str | Path | None, Option("FOLDER", ("--study",))] = None
    quiet: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AtLayers:
    """The layers whose states are measured.

    Attributes:
        layers: Layer to measure: last, all, or a name such as layer.3 or layer.-1.attn; may be
            repeated.

            In Python, give several as a list, or separated by commas. ``last`` is after the final
            norm; ``layer.3`` is the output of block 3, counted from 0; ``layer.-1.attn`` is the
            residual stream after the attention of the last block.
    """

    layers: Annotated[Sequence[str] | str, Option("LAYER", ("--layer",))] = "last"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OfSegments:
    """How many segments of a text are used.

    Attributes:
        segments: Maximum number of segments to draw from a text; for sublayers, only from the texts
            of its kNN-LM.
    """

    segments: Annotated[int, Option("N")] = 100_000


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WithControls:
    """Controls: the same measurement on a model with random weights, or on shuffled tokens.

    Attributes:
        control: Also measure the model with random weights (untrained), or on tokens in random
            order (shuffled); may be repeated.

            In Python, one name, a list of names, or None for no control.
    """

    control: Sequence[Control] | Control | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Law(WithControls, OfSegments, AtLayers, StudyOptions):
    """Correlate perplexity and dispersion, layer by layer.

    Attributes:
        models: Folder or Hub id, with @REVISION for a revision other than main (one model only for
            sublayers).

            In Python, one model or several, which may also be loaded already.
        data: Text: a .txt, .jsonl, .jsonl.gz or .parquet file, or a Hub data set as
            ID[:CONFIGURATION][@SPLIT] (one text only for sublayers).
        bins: Maximum number of bins; segments are binned so that the bins cover the range of
            perplexity evenly, and the correlation is taken over the bins.
        bin_size: Number of segments in a bin.
        contexts: Also measure the perplexity of the single token after each of these numbers of
            tokens.

            Only numbers from 1 to ``segment`` - 1 are used.
        held_out: Second text, on which the line fitted to the bins of the first is tested.

            The segments of this text are binned separately.
    """

    models: Annotated[ModelLike | Sequence[ModelLike], Option("MODEL")]
    data: Annotated[DataLike | Sequence[DataLike], Option("FILE|HUB_ID", ("--data",))]
    _: KW_ONLY
    bins: Annotated[int, Option("N", least=FEWEST_BINS)] = 50
    bin_size: Annotated[int, Option("N", least=3)] = 100
    contexts: Annotated[Sequence[int], Option("N,N")] = (16, 64, 128, 256)
    held_out: Annotated[DataLike | None, Option("FILE|HUB_ID")] = None


@dataclass(frozen=True, eq=False, repr=False)
class Sublayers(OfSegments, AtLayers, StudyOptions):
    """Find the layer with the most dispersed states, for keys of a nearest-neighbour LM (kNN-LM).

    Attributes:
        model: A folder, a Hub id, or a model that is already loaded.
        data: A file, or a data set on the Hub.
        layers: The candidate layers, separated by commas or as a list; by default both sub-layers
            of the last block.
        sizes: Sizes of the random draws, in segments.

            Sizes for which the text has too few segments are left out.
        knn: Also measure the perplexity of a kNN-LM that searches by the states of each
            candidate layer, and by those of the layer last.
        datastore: Text from which a kNN-LM takes its neighbours: a file, a Hub data set, or a share
            of the data such as 0.5.
        tune: Text on which a kNN-LM's weight and temperature are chosen: a file, a Hub data set, or
            a share of the data such as 0.2.
        test: Text on which the perplexity of a kNN-LM is measured: a file, a Hub data set, or a
            share of the data such as 0.1.
        neighbours: Number of nearest neighbours from which a kNN-LM predicts a token.
    """

    model: ModelLike
    data: DataLike
    _: KW_ONLY
    layers: Sequence[str] | str = "layer.-1.attn,layer.-1.ffn"
    segments: int = 1000
    sizes: Annotated[Sequence[int], Option("N,N")] = (10, 50, 100)
    knn: bool = False
    datastore: Annotated[float | DataLike, Option("FILE|HUB_ID", type=_share_or_text)] = PARTS[
        "datastore"
    ]
    tune: Annotated[float | DataLike, Option("FILE|HUB_ID", type=_share_or_text)] = PARTS["tune"]
    test: Annotated[float | DataLike, Option("FILE|HUB_ID", type=_share_or_text)] = PARTS["test"]
    neighbours: Annotated[int, Option("N", least=1)] = NEIGHBOURS


@dataclass(frozen=True, eq=False, repr=False)
class Condensation(WithControls, OfSegments, StudyOptions):
    """Measure how similar the states of a text's tokens are, layer by layer.

    Attributes:
        models: One model or several, each a folder, a Hub id or a loaded model: for example a
            family in several sizes, or one training run at several revisions.
        data: A file, or a data set on the Hub.
        last: Compare models by their mean similarity over this many layers, counted from the last.
        teacher: Teacher model, with which each of the other models (its students) is compared.
    """

    models: ModelLike | Sequence[ModelLike]
    data: DataLike
    _: KW_ONLY
    segments: int = 100
    last: Annotated[int, Option("N", least=1)] = 3
    teacher: Annotated[ModelLike | None, Option("MODEL")] = None


@dataclass(frozen=True, eq=False, repr=False)
class Clusters(AtLayers, StudyOptions):
    """Measure distances within and between clusters of contexts that the same n-gram follows.

    Attributes:
        models: One model or several with the same tokenizer, each a folder, a Hub id or a loaded
            model.
        data: A file, or a data set on the Hub.
        ngram: Number of tokens in an n-gram.
        occurrences: How often an n-gram must occur in the text; also the number of contexts in each
            cluster.
        clusters: Maximum number of clusters, one for each n-gram.
    """

    models: ModelLike | Sequence[ModelLike]
    data: DataLike
    _: KW_ONLY
    segment: int = 100
    ngram: Annotated[int, Option("N")] = 10
    occurrences: Annotated[int, Option("N")] = 100
    clusters: Annotated[int, Option("N")] = 500
