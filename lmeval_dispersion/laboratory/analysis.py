"""One runner for all analyses: a measure over models and texts, kept in a study that can be resumed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.causal_model import CausalModel, control_tokens
from lmeval_dispersion.laboratory.segments import Segments, read_segments, write_segments
from lmeval_dispersion.laboratory.study import Folder, Study, Unit, Units, opened
from lmeval_dispersion.model.identity import adapter_identity, weights_identity
from lmeval_dispersion.model.loading import LoadedModel, ModelChoice, ModelLike, model_choice
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.report import Report, Table, nullable
from lmeval_dispersion.report.cells import json_value, short_names

DataLike = str | Path | Texts


_HUB = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")


def as_texts(data: DataLike, column: str = "text") -> Texts:
    """``data`` as a source of texts; a Hub data set may be written ``id:configuration@split``."""
    if isinstance(data, Texts):
        return data
    text = str(data)
    match = _HUB.fullmatch(text)
    if match and not Path(text).exists() and (match["config"] or match["split"]):
        return Texts(match["id"], column=column, config=match["config"], split=match["split"] or "train")
    return Texts(text, column=column)


def model_settings(model: ModelLike) -> dict[str, Any]:
    """The identity of a model in a study's settings: its content, never its name or place.

    ``weights`` and ``adapter`` are a commit of the Hub or a digest of every byte of the folder (of the
    parameters, for a model that is loaded already); None where the Hub could not be asked. Where it runs is
    no part of it.
    """
    choice = model_choice(model)
    known = {"dtype": choice.dtype, "quantize": choice.quantize}
    if isinstance(model, LoadedModel):
        return {"weights": _parameters_digest(model.model), "adapter": None, **known}
    adapter = None if choice.adapter is None else _identity(adapter_identity, choice.adapter, None)
    return {"weights": _identity(weights_identity, choice.name, choice.revision), "adapter": adapter, **known}


def _identity(of: Callable[[str, str | None], str | None], name: str, revision: str | None) -> str | None:
    if Path(name).expanduser().is_dir():
        return of(name, None)
    from huggingface_hub import hf_hub_download

    file = "adapter_config.json" if of is adapter_identity else "config.json"
    try:
        # The folder of a snapshot is named for its commit; without a network the one in the cache is found.
        return of(name, Path(hf_hub_download(name, file, revision=revision)).parent.name)
    except (OSError, ValueError):  # loading says what is wrong with it
        return None


def _parameters_digest(model: Any) -> str:
    import torch

    digest = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().data)
    return f"sha256:{digest.hexdigest()}"


def as_models(models: ModelLike | Sequence[ModelLike]) -> list[ModelLike]:
    """One model or several as a list."""
    several = [models] if isinstance(models, (str, Path, ModelChoice, LoadedModel)) else list(models)
    names = [full_name(model) for model in several]
    twice = [name for name in names if names.count(name) > 1]
    if not several or twice:
        raise UsageError(
            f"expected different models, got {twice[0]} twice" if twice else "expected a model, got none"
        )
    return several


def labels(models: Sequence[ModelLike]) -> list[str]:
    """The models' names in reports: the last parts of their names, as few as tell all of them apart."""
    choices = [model_choice(model) for model in models]
    names = short_names([_place(choice.name) for choice in choices])
    adapters = short_names([_place(choice.adapter or "") for choice in choices])
    return [_described(*each) for each in zip(names, adapters, choices, strict=True)]


def full_name(model: ModelLike) -> str:
    """A model's name as it was given, with revision, adapter and bits where they are set."""
    choice = model_choice(model)
    return _described(choice.name, choice.adapter or "", choice)


def _described(name: str, adapter: str, choice: ModelChoice) -> str:
    extras = f"@{choice.revision}" if choice.revision else ""
    extras += f" + {adapter}" if adapter else ""
    return name + extras + (f" ({choice.quantize})" if choice.quantize else "")


def _place(name: str) -> str:
    """The whole path of a folder, so that ``.`` has a name too; a Hub id as it is."""
    folder = Path(name).expanduser()
    return folder.resolve().as_posix() if name and folder.is_dir() else name


def data_settings(texts: Texts) -> dict[str, Any]:
    """The identity of a source in a study's settings: a file's content, a Hub data set's commit.

    A data set is read at that commit from here on.
    """
    if texts.path is not None:
        return {"sha256": file_digest(texts.path), "kind": texts.path.suffix, "column": texts.column}
    from huggingface_hub import HfApi

    with suppress(OSError, ValueError):  # reading says what is wrong with it
        texts.revision = HfApi().dataset_info(texts.source, revision=texts.revision).sha
    known = {"source": texts.source, "commit": texts.revision}
    return {**known, "config": texts.config, "split": texts.split, "column": texts.column}


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True, repr=False)
class StudyResult(Report):
    """A finished study as a report; its tables are the fields of the four results."""

    schema = "dispersion-lab-report/2"
    libraries = ("torch", "transformers", "numpy")
    guide = "docs/reference/laboratory.md"
    kind: ClassVar[str]
    main: ClassVar[str]  # the table that CSV and to_frame() hold
    manifest: dict[str, Any]

    @classmethod
    def of(cls: type[R], study: Study) -> R:
        """The result of a complete study."""
        tables = study.tables()
        values = {field.name: tables.get(field.name) for field in fields(cls) if field.name != "manifest"}
        return cls(manifest=study.manifest, **values)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the main table."""
        return records(getattr(self, self.main))

    def to_frame(self) -> pd.DataFrame:
        """The main table, tidy."""
        return nullable(getattr(self, self.main))

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract: the answer, the manifest and every table."""
        frames = {name: value for name, value in vars(self).items() if isinstance(value, pd.DataFrame)}
        content = {
            "manifest": self.manifest,
            "tables": {name: records(frame) for name, frame in frames.items()},
        }
        return {"schema": self.schema, "answer": self.answer(), "kind": self.kind, **json_value(content)}

    def context(self) -> dict[str, Any]:
        """For the template: the models' names, and what was run."""
        manifest = self.manifest
        named = {key: ", ".join(value) for key, value in manifest["names"].items()}
        settings = {
            key: json.dumps(value) if isinstance(value, (dict, list)) else value
            for key, value in manifest["settings"].items()
            if key != "models"
        }
        run = [named, *manifest["models"], settings, {**manifest["versions"], "created": manifest["created"]}]
        return {"models": [model["model"] for model in manifest["models"]], "run": run}


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as mappings."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def table(row: type[Any], frame: pd.DataFrame, caption: str, *, most: int = 0, **options: Any) -> Table:
    """A table of a dataclass's rows, from the columns of a frame that it names."""
    names = [field.name for field in fields(row) if field.name in frame]
    if 0 < most < len(frame):
        options["more"] = f"{most} of {len(frame)} rows; --details shows all."
        frame = frame.iloc[np.linspace(0, len(frame) - 1, most).round().astype(int)]
    rows = [row(**{name: each[name] for name in names}) for each in records(frame)]
    return Table.of(rows, caption, **options)


R = TypeVar("R", bound=StudyResult)


class Analysis:
    """An analysis at work.

    Attributes:
        study: Where it is kept.
        models: What it runs, with the name of each in reports.
        texts: Its sources by name: ``data``, perhaps ``held-out``.
        settings: Its protocol.
    """

    def __init__(
        self,
        study: Study,
        models: Sequence[ModelLike],
        texts: Mapping[str, Texts],
        settings: Mapping[str, Any],
        batch: int | None,
    ) -> None:
        self.study, self.texts, self.settings, self._batch = study, texts, settings, batch
        self.models = dict(zip(labels(models), models, strict=True))

    def batch_size(self, causal: CausalModel, length: int, layers: int) -> int:
        """Segments a forward pass: as asked for, else by memory; settled when the study starts."""
        return int(
            self.study.once(f"batch_size.{length}", lambda: self._batch or causal.batch_size(length, layers))
        )

    def segments(self, name: str, causal: CausalModel, *, count: int, texts: str = "data") -> Segments:
        """Segments of a source, drawn by the first process when the study starts, read afterwards."""
        length, source = self.settings["segment"], self.texts[texts]
        causal.check_segment(length)

        def draw() -> dict[str, Any]:
            options = {"length": length, "count": count, "seed": self.settings["seed"]}
            tokenizer, pack = causal.loaded.tokenizer, self.settings["pack"]
            return write_segments(self.study.work_folder, name, source, tokenizer, pack=pack, **options)

        fresh = f"segments.{name}" not in self.study.manifest
        written = self.study.once(f"segments.{name}", draw)
        drawn = read_segments(self.study.work_folder, name, written, source.source)
        if fresh and self.study.processes.first:
            self.study.say(drawn.counts.report(source.source))
        return drawn

    def over(
        self,
        name: str,
        causal: CausalModel,
        drawn: Segments,
        layers: Sequence[str],
        reduce: Callable[[Tensor, NDArray[np.int64]], NDArray[Any]],
        *,
        control: str = "",
        losses: bool = False,
    ) -> Units:
        """Run all segments, a batch a unit, each of which keeps an array a layer and ``nll`` for losses."""
        n, length = drawn.tokens.shape
        size = self.batch_size(causal, length, len(layers))

        def do(unit: int) -> Unit:
            rows = np.arange(unit * size, min((unit + 1) * size, n))
            origins = drawn.origins[rows]
            tokens = control_tokens(control, drawn.tokens[rows], rows, causal, self.settings["seed"])
            reduced, nll = causal.run(
                tokens,
                layers,
                lambda _layer, states, first: reduce(states, rows[first : first + len(states)]),
                batch=size,
                losses=losses,
            )
            arrays: Unit = {layer: np.concatenate(parts) for layer, parts in reduced.items()}
            if losses:
                arrays["nll"] = nll
            for layer, array in arrays.items():
                place = "the output" if layer == "nll" else layer
                causal.check_finite(array, place, origins, drawn.source)
            return arrays

        return self.study.units(name, -(-n // size), do)


Measure = Callable[[Analysis], None]


def analyse(
    result: type[R],
    measure: Measure,
    models: ModelLike | Sequence[ModelLike],
    data: DataLike,
    settings: Mapping[str, Any],
    batch: int | None,
    folder: Folder,
    quiet: bool,
    *,
    held_out: DataLike | None = None,
) -> R:
    """The result of the study that models, texts and settings name, measured where it is not complete."""
    if batch is not None and batch < 1:
        raise UsageError(f"expected a batch size of at least 1, got {batch}")
    every = as_models(models)
    texts = {"data": as_texts(data), **({} if held_out is None else {"held-out": as_texts(held_out)})}
    identity = {
        "models": [model_settings(model) for model in every],
        **{name.replace("-", "_"): data_settings(source) for name, source in texts.items()},
        **settings,
    }
    names = {
        "models": [full_name(model) for model in every],
        "texts": [source.source for source in texts.values()],
    }
    with opened(result.kind, identity, names, folder, quiet) as study:
        if not study.complete:
            measure(Analysis(study, every, texts, identity, batch))
        return result.of(study)
