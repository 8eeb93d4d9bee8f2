"""What the measures of ``dispersion inspect`` are asked: the declaration; it imports no torch."""

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


def _share_or_text(text: str) -> float | str:
    """A share such as 0.2, or the name of a text."""
    try:
        return float(text)
    except ValueError:
        return text


# Making each declaration compiles its methods, also for `--help`: none compares or prints one.
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StudyOptions:
    """The settings that every measure takes.

    Attributes:
        segment: Number of tokens in a segment or context.
        pack: Join all texts into one before cutting segments (a .txt file is always one text).
        seed: Seed of the draws, the bootstrap and the random weights.
        batch: Number of segments in one forward pass. Default: as many as fit.
        folder: Folder for finished work, from which the same command resumes. Default: in the
            user's cache.

            In Python the default is a temporary folder.
        quiet: Print nothing on standard error.
    """

    segment: Annotated[int, Option("TOKENS")] = 512
    pack: bool = False
    seed: Annotated[int, Option("N")] = 0
    batch: int | None = None
    folder: Annotated[str | Path | None, Option("FOLDER", ("--study",))] = None
    quiet: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AtLayers:
    """The layers that are measured.

    Attributes:
        layers: Layer to measure: last, all, or a name such as layer.3 or layer.-1.attn; may be
            repeated.

            In Python several are separated by commas, or a list.
    """

    layers: Annotated[Sequence[str] | str, Option("LAYER", ("--layer",))] = "last"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OfSegments:
    """How much of a text is read.

    Attributes:
        segments: Number of segments to draw, at most; sublayers draws them for a kNN-LM.
    """

    segments: Annotated[int, Option("N")] = 100_000


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WithControls:
    """What a model is compared with.

    Attributes:
        control: Also measure the model with random weights (untrained), or on tokens in random
            order (shuffled); may be repeated.
    """

    control: Sequence[Control] | Control | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Law(WithControls, OfSegments, AtLayers, StudyOptions):
    """Correlate perplexity and dispersion, layer by layer.

    Attributes:
        models: Folder or Hub id, with @REVISION for another revision than main; sublayers takes one
            model.

            One or several, also a model that is loaded already.
        data: Text: a .txt, .jsonl, .jsonl.gz or .parquet file, or a Hub data set as
            ID[:CONFIGURATION][@SPLIT]; law takes several.
        bins: Number of bins that algorithm 1 of the paper chooses.
        bin_size: Number of segments in a bin.
        contexts: Numbers of tokens after which the perplexity of a single token is measured.

            Those not below ``segment`` are left out.
        held_out: A second text, to test the line fitted on --data.

            It is binned separately.
    """

    models: Annotated[ModelLike | Sequence[ModelLike], Option("MODEL")]
    data: Annotated[DataLike | Sequence[DataLike], Option("FILE|HUB_ID", ("--data",))]
    _: KW_ONLY
    bins: Annotated[int, Option("N")] = 50
    bin_size: Annotated[int, Option("N")] = 100
    contexts: Annotated[Sequence[int], Option("N,N")] = (16, 64, 128, 256)
    held_out: Annotated[DataLike | None, Option("FILE|HUB_ID")] = None


@dataclass(frozen=True, eq=False, repr=False)
class Sublayers(OfSegments, AtLayers, StudyOptions):
    """Find the most dispersed layer, to key a kNN-LM.

    Attributes:
        model: A folder, a Hub id, or a model that is loaded already.
        data: A file, or a data set on the Hub.
        layers: The candidates, separated by commas or as a list; by default both sub-layers of the
            last block.
        sizes: Numbers of segments in a draw.

            Those that the text cannot fill are left out.
        knn: Also compare the perplexity of a kNN-LM keyed by each candidate layer, and by last.
        datastore: Text from which a kNN-LM takes its neighbours: a file, a Hub data set, or a share
            of --data.
        tune: Text on which a kNN-LM's weight and temperature are chosen: a file, a Hub data set, or
            a share of --data.
        test: Text on which the perplexity of a kNN-LM is measured: a file, a Hub data set, or a
            share of --data.
        neighbours: Number of neighbours that predict a token in a kNN-LM.
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
    neighbours: Annotated[int, Option("N")] = NEIGHBOURS


@dataclass(frozen=True, eq=False, repr=False)
class Condensation(WithControls, OfSegments, StudyOptions):
    """Measure how similar a text's tokens are, by layer.

    Attributes:
        models: Models, each a folder, a Hub id, or loaded already; one or several, such as a family
            by size, or a training by revision.
        data: A file, or a data set on the Hub.
        last: Number of last layers over which models are compared.
        teacher: The model from which the others were distilled, to compare them with it.
    """

    models: ModelLike | Sequence[ModelLike]
    data: DataLike
    _: KW_ONLY
    segments: int = 100
    last: Annotated[int, Option("N")] = 3
    teacher: Annotated[ModelLike | None, Option("MODEL")] = None


@dataclass(frozen=True, eq=False, repr=False)
class Clusters(AtLayers, StudyOptions):
    """Measure distances within and between groups of contexts.

    Attributes:
        models: Models of one tokenizer, each a folder, a Hub id, or loaded already; one or several.
        data: A file, or a data set on the Hub.
        ngram: Number of tokens in an n-gram.
        occurrences: How often an n-gram must occur; also the number of contexts in its cluster.
        clusters: Number of clusters, at most.
    """

    models: ModelLike | Sequence[ModelLike]
    data: DataLike
    _: KW_ONLY
    segment: int = 100
    ngram: Annotated[int, Option("N")] = 10
    occurrences: Annotated[int, Option("N")] = 100
    clusters: Annotated[int, Option("N")] = 500
