"""One runner for all analyses: a measure over models and texts, kept in a study that can be resumed.

Texts are cut into segments of equal length, without padding. A document is cut from its start
into segments that do not overlap; the rest is dropped. Where the tokenizer begins a text with
a special token (BOS), every segment begins with it, inside the length. Texts of one running document (a text
file), or all texts with ``pack``, are first joined by a blank line. Segments are drawn in one
pass by reservoir sampling.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, TypedDict, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.causal_model import CausalModel, Reduce, Segments, prefix_of
from lmeval_dispersion.laboratory.frames import FrameReport, records
from lmeval_dispersion.laboratory.study import Folder, Study, Unit, Units, opened
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
from lmeval_dispersion.report.cells import json_value, short_names
from lmeval_dispersion.report.declared import count

DataLike = str | Path | Texts

# An endless stream is read until it has offered so many times the requested segments.
_OVERSAMPLE = 20


class StudyOptions(TypedDict, total=False):
    """Settings of every analysis.

    Attributes:
        pack: Join the texts of a source to one stream before cutting (default: False).
        seed: Of the draws, the bootstrap and the random weights (default: 0).
        batch: Segments a forward pass; by memory if None, the default.
        folder: Folder of the study, for resuming; temporary if None, the default.
        quiet: Whether to print nothing on stderr, where a notebook and a terminal show a bar.
    """

    pack: bool
    seed: int
    batch: int | None
    folder: Folder
    quiet: bool


def model_settings(model: ModelLike) -> dict[str, Any]:
    """A model's identity in a study's settings: its content, never its name or path.

    ``weights`` and ``adapter`` are a commit of the Hub or a digest of every byte of the folder (of the
    parameters, for a loaded model); None if the Hub could not be reached.
    """
    choice = model_choice(model)
    weights: str | None
    adapter = None
    if isinstance(model, LoadedModel):
        weights = _parameters_digest(model.model)
    else:
        weights = weights_identity(choice.name, _commit(choice.name, choice.revision, "config.json"))
        if name := choice.adapter:
            adapter = adapter_identity(name, _commit(name, None, "adapter_config.json"))
    return {"dtype": choice.dtype, "quantize": choice.quantize, "weights": weights, "adapter": adapter}


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
    """The models' names in reports: the last parts of their paths, as few as make them unique."""
    choices = [model_choice(model) for model in models]
    names = short_names([_place(choice.name) for choice in choices])
    adapters = short_names([_place(choice.adapter or "") for choice in choices])
    parts = zip(choices, names, adapters, strict=True)
    return [str(replace(choice, name=name, adapter=adapter or None)) for choice, name, adapter in parts]


def _place(name: str) -> str:
    """The whole path of a folder, so that ``.`` has a name too; a Hub id unchanged."""
    folder = Path(name).expanduser()
    return folder.resolve().as_posix() if name and folder.is_dir() else name


def data_settings(texts: Texts) -> dict[str, Any]:
    """The identity of a source in a study's settings: a file's content, a Hub data set's commit."""
    if texts.path is not None:
        return {"sha256": file_digest(texts.path), "kind": texts.path.suffix, "column": texts.column}
    from huggingface_hub import HfApi

    with suppress(Exception):  # huggingface_hub passes on errors of its HTTP library; reading explains more
        texts.revision = HfApi().dataset_info(texts.name, revision=texts.revision).sha
    known = {"source": texts.name, "commit": texts.revision}
    return {**known, "config": texts.config, "split": texts.split, "column": texts.column}


@dataclass(frozen=True, repr=False)
class StudyResult(FrameReport):
    """A finished study as a report; its tables are the fields of the four results."""

    schema = "dispersion-lab-report/2"
    libraries = ("torch", "transformers", "numpy")
    guide = "docs/reference/laboratory.md"
    kind: ClassVar[str]
    manifest: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract: the answer, the manifest and every table."""
        frames = {name: value for name, value in vars(self).items() if isinstance(value, pd.DataFrame)}
        tables = {name: records(frame) for name, frame in frames.items()}
        content = json_value({"manifest": self.manifest, "tables": tables})
        return {"schema": self.schema, "answer": self.answer(), "kind": self.kind, **content}

    def context(self) -> dict[str, Any]:
        """For the template: the models' names and settings."""
        manifest = self.manifest
        settings = {key: str(value) for key, value in manifest["settings"].items() if key != "models"}
        names = {key: ", ".join(value) for key, value in manifest["names"].items()}
        run = [names, *manifest["models"], settings, {**manifest["versions"], "created": manifest["created"]}]
        return {"models": [model["model"] for model in manifest["models"]], "run": run}


R = TypeVar("R", bound=StudyResult)


@dataclass
class Analysis:
    """A running analysis and its models, by their names in reports."""

    study: Study
    named_models: Mapping[str, ModelLike]
    texts: Mapping[str, Texts]
    settings: Mapping[str, Any]
    batch: int | None
    summaries: list[dict[str, Any]] = field(default_factory=list)

    def models(self, *, losses: bool) -> Iterator[tuple[str, CausalModel, list[str]]]:
        """Every model with its name in reports and its layers, loaded one at a time."""
        length = self.settings["segment"]
        for label, model in self.named_models.items():
            causal = CausalModel(model)
            layers = causal.layers(self.settings["layers"])
            causal.check_segment(length)
            # Fixed when the study starts, so that a resumed study has the same batches.
            size = self.batch or causal.batch_size(length, len(layers), losses=losses)
            causal.batch = int(self.study.once(f"batch_size.{label}", size))
            self.summaries.append({"model": label, **causal.summary()})
            yield label, causal, layers
            del causal  # the next model is loaded after this one is freed

    def drawn(self, name: str, source: Texts, draw: Callable[[], Unit]) -> tuple[Segments, Unit]:
        """Segments that ``draw`` took from a source when the study began; their hash is in the manifest."""
        fresh = f"segments.{name}" not in self.study.manifest

        def counted(_unit: int) -> Unit:
            arrays = draw()
            return {**arrays, "counts": np.array(json.dumps(_counts(source, len(arrays["tokens"]))))}

        arrays = self.study.units(f"segments.{name}", 1, counted).first()
        counts, tokens = json.loads(arrays.pop("counts").item()), arrays["tokens"]
        known = {"counts": counts, "sha256": sha256(np.ascontiguousarray(tokens).data).hexdigest()}
        self.study.once(f"segments.{name}", known)
        if fresh:
            self.study.say(_report(source.source, counts))
        return Segments(tokens, arrays["origins"], source.source), arrays

    def segments(self, name: str, causal: CausalModel, most: int, *, source: str = "data") -> Segments:
        """At most so many segments of a source."""
        options = {key: self.settings[key] for key in ("pack", "seed")}
        texts, length = self.texts[source], self.settings["segment"]
        draw = partial(draw_segments, texts, causal.loaded.tokenizer, length=length, most=most, **options)
        return self.drawn(name, texts, draw)[0]

    def over(
        self, name: str, causal: CausalModel, drawn: Segments, layers: Sequence[str], reduce: Reduce
    ) -> Units:
        """Run all segments, one batch per unit; each unit keeps one array per layer."""

        def do(rows: NDArray[np.int64]) -> Unit:
            return causal.run(drawn, rows, layers, reduce)

        return self.study.blocks(name, len(drawn.tokens), causal.batch, do)

    def finish(self, tables: Mapping[str, pd.DataFrame], **fields: Any) -> None:
        """Keep the tables and complete the study."""
        self.study.finish(tables, models=self.summaries, **fields)


def analyse(
    result: type[R],
    measure: Callable[[Analysis], None],
    models: ModelLike | Sequence[ModelLike],
    data: DataLike,
    settings: Mapping[str, Any],
    run: StudyOptions,
    *,
    held_out: DataLike | None = None,
) -> R:
    """The result of the study of these models, texts and settings; runs missing units."""
    batch = run.get("batch")
    if batch is not None and batch < 1:
        raise UsageError(f"expected a batch size of at least 1, got {batch}")
    chosen = [models] if isinstance(models, (str, Path, ModelChoice, LoadedModel)) else list(models)
    names = [str(model_choice(model)) for model in chosen]
    if len(set(names)) < len(names) or not names:
        raise UsageError(f"expected different models, got {', '.join(names) or 'none'}")
    sources = {"data": data, **({} if held_out is None else {"held_out": held_out})}
    texts = {name: source if isinstance(source, Texts) else Texts(source) for name, source in sources.items()}
    identity = {
        "models": [model_settings(model) for model in chosen],
        **{name: data_settings(source) for name, source in texts.items()},
        **settings,
        "pack": run.get("pack", False),
        "seed": run.get("seed", 0),
    }
    readable = {"models": names, "texts": [source.source for source in texts.values()]}
    with opened(result.kind, identity, readable, run.get("folder"), run.get("quiet", False)) as study:
        if not study.manifest["complete"]:
            named = dict(zip(labels(chosen), chosen, strict=True))
            measure(Analysis(study, named, texts, identity, batch))
        tables = study.tables()
        frames = [each.name for each in fields(result) if each.name != "manifest"]
        return result(manifest=study.manifest, **{name: tables.get(name) for name in frames})


def draw_segments(
    texts: Texts, tokenizer: Any, *, length: int, most: int, seed: int = 0, pack: bool = False
) -> Unit:
    """Draw at most ``most`` segments of ``length`` tokens, in random order.

    Returns:
        ``tokens`` (n, length), uint32, and ``origins`` (n, 2): number of the text in its source, and the
        segment's first token in its document.
    """
    prefix = prefix_of(tokenizer)
    body, least = length - len(prefix), max(2, 1 + len(prefix))
    if length < least:
        raise UsageError(f"expected segments of at least {least} tokens, got {length}")
    if most < 1:
        raise UsageError(f"expected to draw at least 1 segment, got {most}")
    rng, offered = np.random.default_rng(seed), 0
    tokens, origins = np.zeros((most, length), dtype=np.uint32), np.zeros((most, 2), dtype=np.int64)
    for number, start, ids in _cuts(texts, tokenizer, body, pack):
        # Reservoir sampling (algorithm R): the i-th segment replaces one of the kept with chance most/i.
        place = offered if offered < most else int(rng.integers(offered + 1))
        offered += 1
        if place < most:
            tokens[place], origins[place] = [*prefix, *ids], (number, start)
        if offered >= _OVERSAMPLE * most:
            break
    if not offered:
        raise UsageError(
            f"expected text for at least one segment of {length} tokens, got none: "
            f"{_report(texts.source, _counts(texts, 0))}; use shorter segments, "
            + ("or more text" if pack or texts.continuous else "or join texts (pack)")
        )
    order = rng.permutation(min(most, offered))
    return {"tokens": tokens[order], "origins": origins[order]}


def _counts(texts: Texts, kept: int) -> dict[str, int]:
    """Numbers of texts that the latest pass read, skipped and kept."""
    return {"texts": texts.read, **texts.skipped, "kept": kept}


def _report(source: str, counts: Mapping[str, int]) -> str:
    """One sentence on the texts read and left out.

    >>> _report("a.jsonl", {"texts": 3, "empty": 1, "undecodable": 0, "too_short": 1, "kept": 1})
    'a.jsonl: 1 segment from 3 texts (1 empty, 1 too short)'
    """
    skipped = {key.replace("_", " "): n for key, n in counts.items() if key not in ("texts", "kept")}
    left_out = [f"{n} {reason}" for reason, n in skipped.items() if n]
    what = f"{count(counts['kept'], 'segment')} from {count(counts['texts'], 'text')}"
    return f"{source}: {what}" + (f" ({', '.join(left_out)})" if left_out else "")


def tokenised(texts: Texts, tokenizer: Any) -> Iterator[tuple[int, list[int]]]:
    """Every text's number and tokens, without special ones; counts texts on which the tokenizer fails."""
    for text in texts:
        try:
            ids = tokenizer(text.text, add_special_tokens=False, verbose=False).input_ids
        except Exception:  # tokenizers may raise any exception
            texts.skipped["untokenised"] += 1
            continue
        yield text.id, ids


def gap_of(texts: Texts, tokenizer: Any, pack: bool) -> list[int] | None:
    """Tokens that separate two joined texts; None if texts are separate documents."""
    if not (pack or texts.continuous):
        return None
    return list(tokenizer("\n\n", add_special_tokens=False).input_ids)


def _cuts(texts: Texts, tokenizer: Any, body: int, pack: bool) -> Iterator[tuple[int, int, list[int]]]:
    """Segments of ``body`` tokens: the number of the text in which each starts, its offset, its tokens."""
    gap = gap_of(texts, tokenizer, pack)
    start, buffer = 0, list[int]()
    spans: list[tuple[int, int]] = []  # (end of the text in the document, its number)
    for number, ids in tokenised(texts, tokenizer):
        if gap is None:
            start, buffer, spans = 0, [], []
            texts.skipped["too_short"] += len(ids) < body
        buffer += [*ids, *(gap or [])]
        spans.append((start + len(buffer), number))
        while len(buffer) >= body:
            while spans[0][0] <= start:
                spans.pop(0)
            yield spans[0][1], start, buffer[:body]
            del buffer[:body]
            start += body
