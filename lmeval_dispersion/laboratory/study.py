"""What the four analyses share: the run's folder, the text in segments, batches, checks."""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import NonFiniteStateError, UsageError
from lmeval_dispersion.laboratory.engine import Engine
from lmeval_dispersion.laboratory.runs import Run
from lmeval_dispersion.laboratory.segments import Counts, Segments, read_segments, write_segments
from lmeval_dispersion.model.loading import LoadedModel, ModelChoice, ModelLike, model_choice
from lmeval_dispersion.model.texts import Texts

DataLike = str | Path | Texts


class Under(NamedTuple):
    """A folder of runs; each gets a folder of its own in it, named for its kind and settings."""

    root: Path


Folder = str | Path | Under | None

_HUB = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")


def as_texts(data: DataLike, column: str = "text") -> Texts:
    """``data`` as a source of texts; a Hub data set may be written ``id:configuration@split``.

    Raises:
        UsageError: The file does not exist or is of an unknown kind.
    """
    if isinstance(data, Texts):
        return data
    text = str(data)
    match = _HUB.fullmatch(text)
    if match and not Path(text).exists() and (match["config"] or match["split"]):
        return Texts(match["id"], column=column, config=match["config"], split=match["split"] or "train")
    return Texts(text, column=column)


def model_settings(model: ModelLike) -> dict[str, Any]:
    """What identifies a model in a run's settings; where it runs is no part of it."""
    choice = model_choice(model)
    known = {"name": choice.name, "revision": choice.revision, "dtype": choice.dtype}
    return {**known, "quantize": choice.quantize, "adapter": choice.adapter}


def as_models(models: ModelLike | Sequence[ModelLike]) -> list[ModelLike]:
    """One model or several as a list.

    Raises:
        UsageError: There is none, or two would have the same name in the tables.
    """
    several = [models] if isinstance(models, (str, Path, ModelChoice, LoadedModel)) else list(models)
    names = [label(model) for model in several]
    twice = [name for name in names if names.count(name) > 1]
    if not several or twice:
        raise UsageError(
            f"expected different models, got {twice[0]} twice" if twice else "expected a model, got none"
        )
    return several


def label(model: ModelLike) -> str:
    """How a model is called in tables: its name, with revision, adapter and bits where they are set."""
    choice = model_choice(model)
    extras = f"@{choice.revision}" if choice.revision else ""
    extras += f" + {choice.adapter}" if choice.adapter else ""
    extras += f" ({choice.quantize})" if choice.quantize else ""
    return choice.name + extras


def data_settings(texts: Texts | None) -> dict[str, Any] | None:
    """What identifies a source in a run's settings."""
    if texts is None:
        return None
    size = texts.path.stat().st_size if texts.path else None
    known = {"source": texts.source, "column": texts.column, "bytes": size}
    return known if texts.path else {**known, "config": texts.config, "split": texts.split}


@contextmanager
def opened(kind: str, settings: dict[str, Any], folder: Folder, quiet: bool) -> Iterator[Run]:
    """The run in ``folder``, or in a temporary one that goes away."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="dispersion-") as temporary:
            yield Run.open(Path(temporary), kind, settings, quiet=quiet)
        return
    if isinstance(folder, Under):
        key = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
        folder = folder.root / f"{kind}-{key}"
    yield Run.open(Path(folder), kind, settings, quiet=quiet)


def segments_of(
    run: Run, name: str, texts: Texts, engine: Engine, *, length: int, count: int, seed: int, pack: bool
) -> Segments:
    """The run's segments: drawn and written by the first process when the run starts, read afterwards."""
    engine.check_segment(length)
    tokenizer = engine.loaded.tokenizer

    def draw() -> dict[str, Any]:
        drawn = write_segments(
            run.work_folder, name, texts, tokenizer, length=length, count=count, seed=seed, pack=pack
        )
        if not run.quiet:
            print(drawn.counts.report(texts.source), file=sys.stderr)
        return {"counts": drawn.counts.as_dict(), "sha256": digest(drawn.tokens)}

    drawn = run.once(f"segments.{name}", draw)
    return read_segments(run.work_folder, name, Counts(**drawn["counts"]))


def digest(tokens: NDArray[Any]) -> str:
    """A hash of token ids: runs with the same one saw the same text in the same tokens."""
    return sha256(np.ascontiguousarray(tokens).data).hexdigest()


def batch_size(run: Run, engine: Engine, wanted: int | None, length: int, layers: int) -> int:
    """The run's batch size: as asked for, else by memory; settled when the run starts."""
    if wanted is not None and wanted < 1:
        raise UsageError(f"expected a batch size of at least 1, got {wanted}")
    return int(run.once(f"batch_size.{length}", lambda: wanted or engine.batch_size(length, layers)))


def batches(count: int, size: int) -> int:
    """How many batches of ``size`` hold ``count`` segments."""
    return math.ceil(count / size)


def check_finite(
    values: NDArray[Any], layer: str, origins: NDArray[np.int64], source: str, dtype: str = "auto"
) -> None:
    """Raise NonFiniteStateError naming layer and text where a row of ``values`` (b, ...) is not finite."""
    bad = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
    if bad.size:
        text, start = origins[int(bad[0])]
        advice = "use --dtype float32 or bfloat16" if dtype != "float32" else "check the checkpoint's weights"
        raise NonFiniteStateError(
            f"expected finite numbers, got NaN or infinity at {layer} in text {text} of {source} "
            f"(segment from token {start}); {advice}"
        )


def summary_of(engine: Engine) -> dict[str, Any]:
    """What was really run, for the manifest."""
    model = engine.loaded.model
    return {
        "name": engine.loaded.name,
        "revision": engine.loaded.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": engine.loaded.device.type,
        "layers": len(engine.decoder),
        "width": engine.width,
        "parameters": int(sum(p.numel() for p in model.parameters())),
    }
