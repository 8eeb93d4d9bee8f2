"""A study: one measure of models on texts, with its work kept, so that a stopped study goes on.

A study's folder is named for its measure and settings. They include its inputs' *content* (digests,
commits): a changed text or a retrained model is another study. Each unit of work is one ``.npz`` file,
written whole; a killed process loses the unit at work. In the end the tables, as parquet, and
``manifest.json`` replace the work.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.files import keep_arrays, write_whole
from lmeval_dispersion.installation import __version__
from lmeval_dispersion.laboratory.causal_model import CausalModel, Reduce
from lmeval_dispersion.laboratory.frames import StudyResult
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
    ModelChoice,
    ModelLike,
    adapter_identity,
    file_digest,
    model_choice,
    weights_identity,
)
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.output import progress_bar, say_above_progress
from lmeval_dispersion.report.cells import short_names
from lmeval_dispersion.store.format import make_folder

DataLike = str | Path | Texts
TableRow = tuple[str, dict[str, Any]]  # the name of a table, and a row of it
R = TypeVar("R", bound=StudyResult)
T = TypeVar("T")

FORMAT = "dispersion-lab/3"


class StudyOptions(TypedDict, total=False):
    """Settings of every analysis.

    Attributes:
        pack: Join a source's texts into one stream before cutting (default: False).
        seed: Seed of the draws, the bootstrap and the random weights (default: 0).
        batch: Segments per forward pass; by memory if None, the default.
        folder: Folder of studies, for resuming; temporary if None, the default.
        quiet: Whether to print nothing on stderr, where a notebook and a terminal show a bar.
    """

    pack: bool
    seed: int
    batch: int | None
    folder: str | Path | None
    quiet: bool


@dataclass
class Study:
    """A study at work; ``models`` by the names that reports use, ``facts`` for the manifest."""

    folder: Path
    models: Mapping[str, ModelLike]
    texts: Mapping[str, Texts]
    settings: Mapping[str, Any]
    batch: int | None
    quiet: bool
    facts: dict[str, Any] = field(default_factory=dict)

    def kept(self, name: str, works: Sequence[T], do: Callable[[T], Unit]) -> Iterator[Unit]:
        """``do(work)`` of each work, or as kept by an earlier process; DispersionError if it cannot be."""
        folder = self.folder / "units" / name
        make_folder(folder, "study")
        with progress_bar(hidden=self.quiet) as update:
            for number, work in enumerate(works, 1):
                file = folder / f"{number}.npz"
                keep_arrays(file, partial(do, work))
                update(number, len(works), name)
                with np.load(file) as arrays:
                    yield dict(arrays)

    def loaded(self, *, losses: bool) -> Iterator[tuple[str, CausalModel, list[str]]]:
        """Every model with its name in reports and its layers, loaded one at a time."""
        length = self.settings["segment"]
        self.facts["models"] = []
        for label, model in self.models.items():
            causal = CausalModel(model)
            layers = causal.layers(self.settings["layers"])
            causal.check_segment(length)
            size = self.batch or causal.batch_size(length, len(layers), losses=losses)
            # Kept, so that a resumed study has the same batches.
            (kept,) = self.kept(f"batch {label}", [size], lambda size: {"size": np.array(size)})
            self.facts[f"batch_size.{label}"] = causal.batch = int(kept["size"])
            self.facts["models"].append({"model": label, **causal.summary()})
            yield label, causal, layers
            del causal  # the next model is loaded after this one is freed

    def drawn(self, name: str, source: str, draw: Callable[[Texts], Unit]) -> tuple[Segments, Unit]:
        """The segments that ``draw`` takes from a source, and all its arrays."""

        def counted(texts: Texts) -> Unit:
            arrays = draw(texts)
            numbers = counts(texts, len(arrays["tokens"]))
            if not self.quiet:
                say_above_progress(report(texts.source, numbers))
            return {**arrays, "counts": np.array(json.dumps(numbers))}

        (arrays,) = self.kept(f"segments {name}", [self.texts[source]], counted)
        tokens = np.ascontiguousarray(arrays["tokens"])
        known = {
            "counts": json.loads(arrays["counts"].item()),
            "sha256": sha256(tokens.data).hexdigest(),
        }
        self.facts[f"segments.{name}"] = known
        return Segments(tokens, arrays["origins"], self.texts[source].source), arrays

    def segments(
        self, name: str, causal: CausalModel, most: int, *, source: str = "data"
    ) -> Segments:
        """At most ``most`` segments drawn from a source; raises as :func:`draw_segments`."""
        options = {key: self.settings[key] for key in ("pack", "seed")}
        options |= {"length": self.settings["segment"], "most": most}
        tokenizer = causal.loaded.tokenizer
        return self.drawn(name, source, lambda texts: draw_segments(texts, tokenizer, **options))[0]

    def states(
        self, name: str, causal: CausalModel, drawn: Segments, layers: Sequence[str], reduce: Reduce
    ) -> dict[str, NDArray[Any]]:
        """``reduce`` of every segment's states at each layer, (n, ...); one batch is a unit of work."""
        batches = blocks(len(drawn.tokens), causal.batch)
        units = list(self.kept(name, batches, lambda rows: causal.run(drawn, rows, layers, reduce)))
        return {layer: np.concatenate([unit[layer] for unit in units]) for layer in layers}


def studied(
    result: type[R],
    measure: Callable[[Study], Iterable[TableRow]],
    models: ModelLike | Sequence[ModelLike],
    data: DataLike,
    settings: Mapping[str, Any],
    run: StudyOptions,
    *,
    held_out: DataLike | None = None,
) -> R:
    """Run a measure, or read its finished work from the study's folder; UsageError for equal or no models."""
    batch, folder, quiet = run.get("batch"), run.get("folder"), run.get("quiet", False)
    if batch is not None and batch < 1:
        raise UsageError(f"expected a batch size of at least 1, got {batch}")
    chosen = [models] if isinstance(models, (str, Path, ModelChoice, LoadedModel)) else list(models)
    names = [str(model_choice(model)) for model in chosen]
    if len(set(names)) < len(names) or not names:
        raise UsageError(f"expected different models, got {', '.join(names) or 'none'}")
    sources = {"data": data, **({} if held_out is None else {"held_out": held_out})}
    texts = {
        name: source if isinstance(source, Texts) else Texts(source)
        for name, source in sources.items()
    }
    identity = {
        "models": [model_settings(model) for model in chosen],
        **{name: data_settings(source) for name, source in texts.items()},
        **settings,
        "pack": run.get("pack", False),
        "seed": run.get("seed", 0),
    }
    readable = {"models": names, "texts": [source.source for source in texts.values()]}
    key = sha256(json.dumps([FORMAT, identity], sort_keys=True).encode()).hexdigest()[:10]
    with tempfile.TemporaryDirectory(prefix="dispersion-") as temporary:
        place = Path(folder or temporary).expanduser() / f"{result.kind}-{key}"
        if not _manifest(place):
            named = dict(zip(labels(chosen), chosen, strict=True))
            study = Study(place, named, texts, identity, batch, quiet)
            _complete(study, measure(study), {"kind": result.kind, "names": readable})
        shutil.rmtree(place / "units", ignore_errors=True)
        if folder is not None and not quiet:
            say_above_progress(f"the study is kept in {place}")
        manifest = _manifest(place)
        tables = {name: pd.read_parquet(place / f"{name}.parquet") for name in manifest["tables"]}
        return result(manifest=manifest, **tables)


def _manifest(place: Path) -> dict[str, Any]:
    """The manifest of a complete study; empty before that."""
    file = place / "manifest.json"
    manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return manifest if manifest.get("complete") else {}


def _complete(study: Study, rows: Iterable[TableRow], about: Mapping[str, Any]) -> None:
    """Write the tables, then the manifest: from then on the units of work are not needed."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, row in rows:
        tables.setdefault(name, []).append(row)
    for name, table in tables.items():
        write_whole(study.folder / f"{name}.parquet", pd.DataFrame(table).to_parquet(index=False))
    versions = {name: version(name) for name in ("torch", "transformers")}
    manifest = {
        "format": FORMAT,
        **about,
        "complete": True,
        "settings": study.settings,
        **study.facts,
    }
    manifest["created"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    manifest |= {
        "versions": {"lmeval_dispersion": __version__, **versions},
        "tables": sorted(tables),
    }
    write_whole(study.folder / "manifest.json", json.dumps(manifest, indent=1).encode())


def model_settings(model: ModelLike) -> dict[str, Any]:
    """A model's identity in a study's settings: its content, never its name or path.

    ``weights`` and ``adapter`` are a Hub commit or a digest over every byte of the folder (over the
    parameters, for a loaded model); None if the Hub could not be reached.
    """
    choice = model_choice(model)
    weights: str | None
    adapter = None
    if isinstance(model, LoadedModel):
        weights = _parameters_digest(model.model)
    else:
        weights = weights_identity(
            choice.name, _commit(choice.name, choice.revision, "config.json")
        )
        if name := choice.adapter:
            adapter = adapter_identity(name, _commit(name, None, "adapter_config.json"))
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
        return Path(hf_hub_download(name, file, revision=revision)).parent.name
    except (OSError, ValueError):  # loading reports the problem
        return None


def _parameters_digest(model: Any) -> str:
    digest = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().data)
    return f"sha256:{digest.hexdigest()}"


def labels(models: Sequence[ModelLike]) -> list[str]:
    """Names in reports: fewest last parts of paths that differ, with revision, adapter and quantisation."""
    choices = [model_choice(model) for model in models]
    names = short_names([_path(choice.name) for choice in choices])
    adapters = short_names([_path(choice.adapter or "") for choice in choices])
    parts = zip(choices, names, adapters, strict=True)
    return [
        str(replace(choice, name=name, adapter=adapter or None)) for choice, name, adapter in parts
    ]


def _path(name: str) -> str:
    """The whole path of a folder, so that ``.`` has a name too; a Hub id unchanged."""
    folder = Path(name).expanduser()
    return folder.resolve().as_posix() if name and folder.is_dir() else name


def data_settings(texts: Texts) -> dict[str, Any]:
    """A source's identity in settings: a file's digest, or a Hub data set's commit, None if unknown."""
    if texts.path is not None:
        return {
            "sha256": file_digest(texts.path),
            "kind": texts.path.suffix,
            "column": texts.column,
        }
    from huggingface_hub import HfApi

    with suppress(
        Exception
    ):  # huggingface_hub passes on errors of its HTTP library; reading explains more
        texts.revision = HfApi().dataset_info(texts.name, revision=texts.revision).sha
    known = {"source": texts.name, "commit": texts.revision}
    return {**known, "config": texts.config, "split": texts.split, "column": texts.column}
