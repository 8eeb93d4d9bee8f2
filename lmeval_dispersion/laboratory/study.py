"""The runner: a measure's rows for every model and text, from one cache of units of work.

A study is one measure of one model on one text, known by its settings and the *content* of its
inputs (digests, commits): a changed text or a retrained model is another study. While it is at
work, each unit is one ``.npz`` file, written whole; a killed process loses the unit at work. In the
end its rows are one file in their place, which the next command reads: a family with one more
member runs that member alone.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.files import hashed, keep_arrays, write_whole
from lmeval_dispersion.installation import __version__
from lmeval_dispersion.laboratory.arguments import StudyOptions
from lmeval_dispersion.laboratory.models import CausalModel, Reduce
from lmeval_dispersion.laboratory.segments import (
    Segments,
    Unit,
    blocks,
    counts,
    draw_segments,
    report,
)
from lmeval_dispersion.model.loading import (
    LoadedModel,
    ModelLike,
    adapter_identity,
    file_digest,
    model_choice,
    weights_identity,
)
from lmeval_dispersion.model.texts import DataLike, Texts
from lmeval_dispersion.output import progress_bar, say_above_progress
from lmeval_dispersion.report.cells import plain, short_names
from lmeval_dispersion.store.format import make_folder

TableRow = tuple[str, dict[str, Any]]  # the name of a table, and a row of it
Measure = Callable[["Study"], Iterable[TableRow]]
T = TypeVar("T")

_LAYOUT = 4  # of kept units and rows; another number makes other studies


@dataclass
class Study:
    """One measure of one model, while it runs.

    Attributes:
        place: Folder in which finished units of work are kept; with the suffix ``.json``, the file
            of the finished rows.
        load: Returns the model, which is loaded at the first call.
        texts: The texts by name: ``data``, and further texts such as ``held_out``.
        settings: The settings of the measure, and those of every study: ``segment``, ``pack`` and
            ``seed``.
        batch: Number of segments in one forward pass; None for as many as fit into memory, at
            most 64.
        quiet: Whether to print nothing on stderr.
        label: The model's name in reports.
        earlier: The ``facts`` of the studies that ran before this one in the same call.
        facts: The facts on this study that the manifest lists, by name.
    """

    place: Path
    load: Callable[[], CausalModel]
    texts: Mapping[str, Texts]
    settings: Mapping[str, Any]
    batch: int | None = None
    quiet: bool = False
    label: str = ""
    earlier: Sequence[Mapping[str, Any]] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def finished(self, measure: Measure) -> list[TableRow]:
        """Return the rows of the measure, each with the name of its table.

        If an earlier process has finished this study, its rows and facts are read back. In either
        case the folder with the units of work is deleted in the end.

        Args:
            measure: Yields the rows, each with the name of its table.
        """
        file = self.place.with_suffix(".json")
        if not file.exists():
            rows = list(measure(self))
            self.facts["created"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self.facts["lmeval_dispersion"] = __version__
            for library in ("torch", "transformers"):
                self.facts[library] = version(library)
            write_whole(file, json.dumps([self.facts, rows], default=plain).encode())
        shutil.rmtree(self.place, ignore_errors=True)
        self.facts, kept = json.loads(file.read_text(encoding="utf-8"))
        return [(name, row) for name, row in kept]

    def kept(self, name: str, works: Sequence[T], do: Callable[[T], Unit]) -> Iterator[Unit]:
        """Yield the arrays of ``do(work)`` for each unit of work, after saving them in a folder.

        Units that an earlier process has finished are read back from their files.

        Args:
            name: Name of the folder, inside that of the study.
            works: The units of work, in order.
            do: Does one unit and returns its arrays.

        Raises:
            DispersionError: The folder cannot be made or written.
        """
        folder = self.place / name
        make_folder(folder, "study")
        with progress_bar(hidden=self.quiet) as update:
            for number, work in enumerate(works, 1):
                file = folder / f"{number}.npz"
                keep_arrays(file, functools.partial(do, work))
                update(number, len(works), f"{self.label} {name}".strip())
                with np.load(file) as arrays:
                    yield dict(arrays)

    def loaded(self, *, losses: bool) -> tuple[CausalModel, list[str]]:
        """Load the model, and choose its layers and its batch size.

        Args:
            losses: Whether log-probabilities will be computed, which makes batches smaller.

        Returns:
            The model, and the full names of the layers to measure.

        Raises:
            UsageError: The model cannot be loaded, a layer is unknown, or the segments exceed the
                model's context.
        """
        causal = self.load()
        length = self.settings["segment"]
        layers = causal.layers(self.settings["layers"])
        causal.check_segment(length)
        size = self.batch or causal.batch_size(length, len(layers), losses=losses)
        # Kept, so that a resumed study has the same batches.
        (kept,) = self.kept("batch", [size], lambda size: {"size": np.array(size)})
        causal.batch = int(kept["size"])
        self.facts |= {**causal.summary(), "batch_size": causal.batch}
        return causal, layers

    def drawn(self, name: str, source: str, draw: Callable[[Texts], Unit]) -> tuple[Segments, Unit]:
        """Draw segments from one of the texts, or read back those of an earlier process.

        Args:
            name: Name of the draw in the study's folder and in the manifest.
            source: Name of the text in ``texts``.
            draw: Returns ``tokens`` and ``origins`` of `Segments`, and any further arrays.

        Returns:
            The segments, and all arrays that ``draw`` returned.
        """

        def counted(texts: Texts) -> Unit:
            arrays = draw(texts)
            numbers = counts(texts, len(arrays["tokens"]))
            if not self.quiet:
                say_above_progress(report(texts.source, numbers))
            return {**arrays, "counts": np.array(json.dumps(numbers))}

        (arrays,) = self.kept(f"segments {name}", [self.texts[source]], counted)
        tokens = np.ascontiguousarray(arrays["tokens"])
        draws = self.facts.setdefault("segments", {})
        draws[name] = {
            "counts": json.loads(arrays["counts"].item()),
            "sha256": sha256(tokens.data).hexdigest(),
        }
        return Segments(tokens, arrays["origins"], self.texts[source].source), arrays

    def segments(
        self, name: str, causal: CausalModel, most: int, *, source: str = "data"
    ) -> Segments:
        """Draw at most ``most`` segments from one of the texts.

        Args:
            name: Name of the draw in the study's folder and in the manifest.
            causal: The model, whose tokenizer cuts the segments.
            most: Maximum number of segments.
            source: Name of the text in ``texts``.

        Raises:
            UsageError: The text is too short for a segment.
        """
        draw = functools.partial(
            draw_segments,
            tokenizer=causal.loaded.tokenizer,
            length=self.settings["segment"],
            most=most,
            seed=self.settings["seed"],
            pack=self.settings["pack"],
            suffix=causal.suffix,
        )
        segments, _ = self.drawn(name, source, draw)
        return segments

    def states(
        self, name: str, causal: CausalModel, drawn: Segments, layers: Sequence[str], reduce: Reduce
    ) -> dict[str, NDArray[Any]]:
        """Run all segments through a model, and return the reduced states of each layer.

        Results that an earlier process has saved are read back.

        Args:
            name: Name of this work in the study's folder.
            causal: The model.
            drawn: The n segments.
            layers: Full names of the layers.
            reduce: Turns the states of a batch, shape (b, t, d), into an array with b rows.

        Returns:
            For each layer, by name, an array with n rows.
        """
        batches = blocks(len(drawn.tokens), causal.batch)
        parts: dict[str, list[NDArray[Any]]] = {layer: [] for layer in layers}
        run = functools.partial(causal.run, drawn, layers=layers, reduce=reduce)
        for unit in self.kept(name, batches, run):
            for layer in layers:
                parts[layer].append(unit[layer])
        return {layer: np.concatenate(states) for layer, states in parts.items()}


def studied(
    kind: str,
    measure: Measure,
    models: ModelLike | Sequence[ModelLike],
    data: DataLike | Sequence[DataLike],
    settings: Mapping[str, Any],
    asked: StudyOptions,
    *,
    further: Mapping[str, DataLike] = MappingProxyType({}),
    read: Callable[[ModelLike], CausalModel] = CausalModel,
) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """Run a measure for every model on every text, and collect the rows of its tables.

    Args:
        kind: Name of the measure.
        measure: Yields the rows of one study, each with the name of its table.
        models: One model or several.
        data: One text or several.
        settings: The settings of the measure.
        asked: The settings that every measure takes.
        further: Other texts that the measure takes, by name.
        read: Loads a model that is to be measured.

    Returns:
        The manifest, and the tables by name. The first two columns of each table, ``model`` and
        ``data``, are the names of the model and the text.

    Raises:
        UsageError: Two models or two texts have the same name, no model or no text is given, or a
            setting does not fit a model or a text.
    """
    quiet = asked.quiet
    folder = asked.folder
    chosen = as_models(models)
    names = [str(model_choice(model)) for model in chosen]
    given = [data] if isinstance(data, DataLike) else data
    sources = [_texts(source) for source in given]
    source_names = [texts.source for texts in sources]
    _check_different("models", names)
    _check_different("texts", source_names)
    settings = {
        **settings,
        "segment": asked.segment,
        "pack": asked.pack,
        "seed": asked.seed,
    }
    contents = [data_settings(texts) for texts in sources]
    more_texts = {name: _texts(source) for name, source in further.items()}
    others = {name: data_settings(texts) for name, texts in more_texts.items()}
    short = short_names(source_names)
    facts: list[dict[str, Any]] = []
    tables: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="dispersion-") as temporary:
        root = Path(folder or temporary).expanduser()
        for label, model in zip(labels(chosen), chosen, strict=True):
            load = functools.cache(functools.partial(read, model))
            of_model = {"model": model_settings(model), **others}
            for name, texts, content in zip(short, sources, contents, strict=True):
                inputs = {**of_model, "data": content}
                place = root / f"{kind}-{_key(kind, inputs, settings)}"
                read_texts = {"data": texts, **more_texts}
                study = Study(place, load, read_texts, settings, asked.batch, quiet, label, facts)
                about = {"model": label, "data": name}
                for table, row in study.finished(measure):
                    rows = tables.setdefault(table, [])
                    rows.append({**about, **row})
                fact = {
                    **about,
                    "study": place.name,
                    **study.facts,
                    "inputs": inputs,
                }
                facts.append(fact)
            del study, load  # the next model is loaded after this one is freed
    if folder is not None and not quiet:
        say_above_progress(
            f"finished results are kept in {root}: {', '.join(each['study'] for each in facts)}"
        )
    manifest = {
        "kind": kind,
        "names": {
            "models": names,
            "texts": [*source_names, *(texts.source for texts in more_texts.values())],
        },
        "settings": settings,
        "models": facts,
    }
    return manifest, {name: pd.DataFrame(rows) for name, rows in tables.items()}


def _check_different(what: str, names: Sequence[str]) -> None:
    """Raise UsageError for two equal names, or none."""
    if not names:
        raise UsageError(f"expected one or more {what}, got none; give at least one")
    if len(set(names)) < len(names):
        raise UsageError(
            f"expected different {what}, got {', '.join(names)}; give each of these {what} once"
        )


def as_models(models: ModelLike | Sequence[ModelLike]) -> list[ModelLike]:
    """Return a list of models, given one model or several."""
    return [models] if isinstance(models, ModelLike) else list(models)


def _texts(source: DataLike) -> Texts:
    return source if isinstance(source, Texts) else Texts(source)


def _key(kind: str, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """A study's name: equal for equal content."""
    identity = json.dumps([_LAYOUT, kind, inputs, settings], sort_keys=True)
    return hashed(identity)[:10]


def model_settings(model: ModelLike) -> dict[str, Any]:
    """Return what identifies a model's content, whatever its name and path are.

    Returns:
        A mapping with these entries.

        - ``dtype`` and ``quantize``: how the model is loaded;
        - ``weights``: ``NAME@COMMIT`` for a model of the Hub, a digest of the files for a folder,
            or a digest of the parameters for a loaded model; None if that is unknown;
        - ``adapter``: likewise for the adapter; None without an adapter.
    """
    choice = model_choice(model)
    weights: str | None
    adapter = None
    if isinstance(model, LoadedModel):
        weights = _parameters_digest(model.model)
    else:
        commit = _commit(choice.name, choice.revision, "config.json")
        weights = weights_identity(choice.name, commit)
        if choice.adapter:
            commit = _commit(choice.adapter, None, "adapter_config.json")
            adapter = adapter_identity(choice.adapter, commit)
    return {
        "dtype": choice.dtype,
        "quantize": choice.quantize,
        "weights": weights,
        "adapter": adapter,
    }


def _commit(name: str, revision: str | None, file: str) -> str | None:
    """Commit of a Hub repository, or of the cached copy without a network; None for a folder."""
    if Path(name).expanduser().is_dir():
        return None
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(name, file, revision=revision)
    except (OSError, ValueError):  # loading reports the problem
        return None
    return Path(path).parent.name


def _parameters_digest(model: Any) -> str:
    digest = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        about = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        digest.update(about.encode())
        values = tensor.detach().cpu().contiguous()
        raw = values.reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().data)
    return f"sha256:{digest.hexdigest()}"


def labels(models: Sequence[ModelLike]) -> list[str]:
    """Return a short name for each model, for reports.

    A name begins with the end of the path: as many of its last parts as are needed for all paths to
    differ. The revision, the adapter and the quantisation follow, if they are given.
    """
    choices = [model_choice(model) for model in models]
    names = short_names([_path(choice.name) for choice in choices])
    adapters = short_names([_path(choice.adapter or "") for choice in choices])
    shortened = []
    for choice, name, adapter in zip(choices, names, adapters, strict=True):
        short = replace(choice, name=name, adapter=adapter or None)
        shortened.append(str(short))
    return shortened


def _path(name: str) -> str:
    """The whole path of a folder, so that ``.`` has a name too; a Hub id unchanged."""
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder.resolve().as_posix()
    return name


def data_settings(texts: Texts) -> dict[str, Any]:
    """Return what identifies a text's content: the digest of a file or the commit of a data set.

    ``texts.revision`` is set to the commit of the data set. If the Hub cannot be reached, the
    commit is the revision that was asked for, or None.
    """
    if texts.path is not None:
        return {
            "sha256": file_digest(texts.path),
            "kind": texts.path.suffix,
            "column": texts.column,
        }
    from huggingface_hub import HfApi

    # huggingface_hub passes on errors of its HTTP library; reading explains more.
    with suppress(Exception):
        info = HfApi().dataset_info(texts.name, revision=texts.revision)
        texts.revision = info.sha
    return {
        "source": texts.name,
        "commit": texts.revision,
        "config": texts.config,
        "split": texts.split,
        "column": texts.column,
    }
