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


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What every measure takes.

    Attributes:
        segment: Tokens of a segment or context.
        pack: Join all texts into one stream (.txt always is).
        seed: Seed of all draws, of the bootstrap and of random weights.
        batch: Segments of a forward pass. Default: as many as the memory allows.
        folder: Folder of studies; the same command resumes its own. Default: in the user's cache.

            In Python a temporary one is the default.
        quiet: Print nothing on standard error, where a notebook and a terminal show a bar.
    """

    segment: Annotated[int, Option("TOKENS")] = 512
    pack: bool = False
    seed: Annotated[int, Option("N")] = 0
    batch: int | None = None
    folder: Annotated[str | Path | None, Option("FOLDER", ("--study",))] = None
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class AtLayers:
    """The layers that are measured.

    Attributes:
        layers: last, all, or a name such as layer.3 or layer.-1.attn; may be repeated.
    """

    layers: Annotated[Sequence[str] | str, Option("LAYER", ("--layer",))] = "last"


@dataclass(frozen=True, kw_only=True)
class OfSegments:
    """How much of a text is read.

    Attributes:
        segments: Segments to draw; sublayers draws them for a kNN-LM.
    """

    segments: Annotated[int, Option("N")] = 100_000


@dataclass(frozen=True, kw_only=True)
class WithControls:
    """What a model is compared with.

    Attributes:
        control: Also run the model with random weights, or each text's tokens in random order; may
            be repeated.
    """

    control: Sequence[Control] | Control | None = None


@dataclass(frozen=True)
class Law(WithControls, OfSegments, AtLayers, StudyOptions):
    """Perplexity against dispersion, per layer.

    Attributes:
        models: Folder or Hub id, with @REVISION where it is not the main one; sublayers takes one
            model.

            Or a model that is loaded already; one, or several.
        data: .txt, .jsonl, .jsonl.gz or .parquet, or a Hub data set, ID[:CONFIGURATION][@SPLIT];
            law takes several.
        bins: Bins that algorithm 1 chooses.
        bin_size: Segments of a bin.
        contexts: Context lengths of the last-token variant.

            Those that are not shorter than a segment are left out.
        held_out: A second text, binned separately.

            The line that is fitted on ``data`` is tested on it.
    """

    models: Annotated[ModelLike | Sequence[ModelLike], Option("MODEL")]
    data: Annotated[DataLike | Sequence[DataLike], Option("FILE|HUB_ID", ("--data",))]
    _: KW_ONLY
    bins: Annotated[int, Option("N")] = 50
    bin_size: Annotated[int, Option("N")] = 100
    contexts: Annotated[Sequence[int], Option("N,N")] = (16, 64, 128, 256)
    held_out: Annotated[DataLike | None, Option("FILE|HUB_ID")] = None


@dataclass(frozen=True)
class Sublayers(OfSegments, AtLayers, StudyOptions):
    """Which sub-layer should key a kNN-LM.

    Attributes:
        model: The model, a folder, a Hub id or loaded already.
        data: The text, a file or a Hub data set.
        layers: The candidates, by default both sub-layers of the last block.
        sizes: Segments of a draw.

            Draws that the text cannot fill are left out.
        knn: Also key a kNN-LM by each candidate, and by last, and compare their perplexities.
        datastore: Of a kNN-LM, the text that the neighbours are of, or a share of the data's
            segments in their order.
        tune: Of a kNN-LM, the text that chooses the neighbours' weight and temperature, or a share
            of the data's segments in their order.
        test: Of a kNN-LM, the text whose perplexity is given, or a share of the data's segments in
            their order.
        neighbours: Neighbours of a token in a kNN-LM.
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


@dataclass(frozen=True)
class Condensation(WithControls, OfSegments, StudyOptions):
    """Similarity of a text's tokens by layer.

    Attributes:
        models: Models, each a folder, a Hub id or loaded already; one, or several, such as a
            family by size or a training by revision.
        data: The text, a file or a Hub data set.
        last: Last depths by which models are compared.
        teacher: The model that the others are compared with, as distilled from it.
    """

    models: ModelLike | Sequence[ModelLike]
    data: DataLike
    _: KW_ONLY
    segments: int = 100
    last: Annotated[int, Option("N")] = 3
    teacher: Annotated[ModelLike | None, Option("MODEL")] = None


@dataclass(frozen=True)
class Clusters(AtLayers, StudyOptions):
    """Distances within and between contexts.

    Attributes:
        models: Models of one tokenizer, each a folder, a Hub id or loaded already; one, or
            several, such as revisions of one training.
        data: The text, a file or a Hub data set; it is read whole.
        ngram: Tokens of an n-gram.
        occurrences: Times that an n-gram must occur, and contexts of a cluster.
        clusters: Clusters at most.

            Those of the most frequent n-grams.
    """

    models: ModelLike | Sequence[ModelLike]
    data: DataLike
    _: KW_ONLY
    segment: int = 100
    ngram: Annotated[int, Option("N")] = 10
    occurrences: Annotated[int, Option("N")] = 100
    clusters: Annotated[int, Option("N")] = 500
