"""What a checkpoint's files lack, by the reports of transformers and PEFT.

Both set a weight that is not in the files at random, and say so only in a log. A load is complete if
every parameter has its values from the files or from the class itself, as tied heads and buffers do.

lm-eval asks neither library for its report. :func:`watched_loads` does, for each load in its context,
by public names: ``PreTrainedModel.from_pretrained(output_loading_info=True)``, through which whole
models, bases, GGUF files and remote code are loaded, and the result of ``PeftModel.load_adapter``.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from lmeval_dispersion.errors import DispersionError, count

#: Takes the name or folder of a load that is not complete, and the sentence on it.
Tell = Callable[[str, str], None]

# Parts of an adapter's parameters that PEFT loads by other names, or that layers share.
_LOADED_ELSEWHERE = ("prompt_encoder", "vblora_vector_bank", "unilora_theta_d", "tinylora_v")
_ADAPTER_PART = re.compile(
    r"^(base_model\.model\.)?|\.(lora|base_layer|modules_to_save)\w*(\..*)?$"
)
_OTHER_BASE = "write the base that the adapter was trained on into adapter_config.json, or save the adapter again"
# lm-eval gives the base the tokenizer's size before it loads an adapter.
_CUT_BASE = (
    "the adapter's rows are for a vocabulary of another size; name the tokenizer that it was "
    "trained with (model_args tokenizer=...), or merge the adapter into its base (merge_and_unload, "
    "save_pretrained)"
)
_UNMERGED = re.compile(r"\.(lora_\w+|base_layer|original_module|modules_to_save)\.")
_SIZE_MISMATCH = re.compile(r"size mismatch for (\S+): ")  # torch's, of one tensor


@contextmanager
def watched_loads(tell: Tell, *, adapter: bool = False) -> Iterator[None]:
    """Inside this context, report every model that is loaded although its files lack weights.

    Args:
        tell: Called with the name or folder of such a model or adapter, and a sentence on what is
            missing. If it raises an error, loading fails with that error.
        adapter: Whether to watch adapters of PEFT too, which imports PEFT.

    Raises:
        DispersionError: A tensor in the files does not have the shape that the model needs, or a
            missing tensor cannot be initialised.
    """
    import transformers

    with ExitStack() as stack:
        kind = transformers.PreTrainedModel
        stack.enter_context(
            _replaced(kind, "from_pretrained", _watched_from_pretrained(kind, tell))
        )
        stack.enter_context(_replaced(kind, "load_adapter", _watched_beside(kind, tell)))
        if adapter:
            import peft

            watched = _watched_adapter(peft.PeftModel, tell)
            stack.enter_context(_replaced(peft.PeftModel, "load_adapter", watched))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # the sentence says it
        yield


@contextmanager
def warned_loads(*, adapter: bool = False) -> Iterator[None]:
    """Inside this context, warn on stderr about every loaded model whose files lack weights.

    ``adapter`` and the errors raised are as in :func:`watched_loads`.
    """

    def warn(name: str, sentence: str) -> None:
        print(f"warning: {name}: {sentence}", file=sys.stderr)

    with watched_loads(warn, adapter=adapter):
        yield


@contextmanager
def _replaced(kind: type, name: str, replacement: Any) -> Iterator[None]:
    """Replace a class's attribute, inherited or its own, in the block."""
    own = vars(kind).get(name)
    setattr(kind, name, replacement)
    try:
        yield
    finally:
        if own is None:
            delattr(kind, name)
        else:
            setattr(kind, name, own)


# --- where models are loaded -------------------------------------------------------------------------------


def _watched_from_pretrained(kind: type, tell: Tell) -> Any:
    """Transformers' ``from_pretrained``, which tells of weights that the files lack."""
    original = vars(kind)["from_pretrained"]

    @wraps(original.__func__)
    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        load = original.__get__(None, cls)
        report_is_asked = options.pop("output_loading_info", False)
        options["output_loading_info"] = True
        shapes_differ = False
        try:
            model, report = load(*args, **options)
        except NotImplementedError as error:  # torch's, of numbers that are not floating ones
            raise DispersionError(
                "the checkpoint's files seem to lack weights of a type that cannot be set at random "
                f"({error}); save or download the model again"
            ) from error
        except RuntimeError as error:
            text = str(error)
            shapes_differ = "ignore_mismatched_sizes" in text or "size mismatch" in text
            if not shapes_differ:
                raise
        if shapes_differ:  # a second load reports which ones; the first model is let go by now
            options["ignore_mismatched_sizes"] = True
            model, report = load(*args, **options)
            raise DispersionError(_of_other_shape(model, report))
        # Of a model with an adapter in its folder this is the adapter's report: see load_adapter.
        if not model._hf_peft_config_loaded:
            sentence = report_sentence(model, report)
            if sentence:
                tell(_name_of(model), sentence)
        if report_is_asked:
            return model, report
        return model

    return classmethod(from_pretrained)


def _watched_beside(kind: Any, tell: Tell) -> Any:
    """Transformers' own ``load_adapter``, for an adapter that lies in the whole model's folder.

    ``from_pretrained`` then reports the adapter alone. The model's report is among its variables;
    where it is not, the model is not judged.
    """
    original = kind.load_adapter

    @wraps(original)
    def load_adapter(self: Any, *args: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        whole: Any = caller.f_locals.get("loading_info")
        sentences = []
        if caller.f_code.co_name == "from_pretrained" and hasattr(whole, "to_dict"):
            sentences.append(report_sentence(self, whole.to_dict()))
        result = original(self, *args, **options)
        if hasattr(result, "missing_keys"):  # of transformers 5
            missing = _missing(self, result.missing_keys)
            sentences.append(_misfit(_name_of(self), missing, sorted(result.unexpected_keys)))
        for sentence in filter(None, sentences):
            tell(_name_of(self), sentence)
        return result

    return load_adapter


def _watched_adapter(kind: Any, tell: Tell) -> Any:
    """PEFT's ``load_adapter``, which tells of an adapter that does not fit its base."""
    original = kind.load_adapter

    @wraps(original)
    def load_adapter(self: Any, name: Any, adapter_name: str, *args: Any, **options: Any) -> Any:
        try:
            result = original(self, name, adapter_name, *args, **options)
        except KeyError as error:  # PEFT's, of a module to save
            tensor = str(error.args[0]).removeprefix("base_model.model.")
            raise DispersionError(
                f"the adapter's file has no tensor {tensor}, which adapter_config.json names; save the "
                "adapter again"
            ) from error
        except RuntimeError as error:
            names = _SIZE_MISMATCH.findall(str(error))
            if not names:
                raise
            tensors = count(len(names), "tensor of the adapter does", "tensors of the adapter do")
            of_tokens = all("lm_head" in name or "embed" in name for name in names)
            raise DispersionError(
                f"{tensors} not have the shape that adapter_config.json and the base "
                f"{_name_of(self)} require (first: {_module(names[0])}); "
                f"{_CUT_BASE if of_tokens else _OTHER_BASE}"
            ) from error
        sentence = adapter_sentence(self, adapter_name, result.missing_keys, result.unexpected_keys)
        if sentence:
            tell(str(name), sentence)
        return result

    return load_adapter


# --- what a report says ------------------------------------------------------------------------------------


def report_sentence(model: Any, report: Mapping[str, Collection[Any]]) -> str:
    """Return a sentence on the tensors that a model's files lack; "" if none is missing.

    If tensors do not have the shape that the model needs, the sentence is on these.

    Args:
        model: A model that transformers has loaded.
        report: The report of that load, from ``output_loading_info=True``.
    """
    if report["mismatched_keys"]:
        return _of_other_shape(model, report)
    missing = _missing(model, report["missing_keys"])
    if not missing:
        return ""
    first = missing[0]
    tensors = count(len(_parameters(model)), "tensor")
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{len(missing)} of its {tensors} {verb} not in its files and would be set at random "
        f"(first: {first}); {_advice(model, missing, sorted(map(str, report['unexpected_keys'])))}"
    )


def _advice(model: Any, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What to do about missing tensors, by the names in the files that belong to no module."""
    first = missing[0]
    wrapped = next((name for name in unexpected if name.endswith(f".{first}")), "")
    unmerged = next((name for name in unexpected if _UNMERGED.search(name)), "")
    if unmerged:
        return (
            f"its files contain an adapter that is not merged ({unmerged}); merge the adapter into the "
            "model (merge_and_unload, save_pretrained)"
        )
    if wrapped:
        wrapper = wrapped.removesuffix(f".{first}")
        # transformers 4 reports strange names with its own prefix.
        wrapper = wrapper.removeprefix(f"{model.base_model_prefix}.")
        return (
            f"its files call that tensor {wrapper}.{first}; save the model inside its wrapper "
            f"({wrapper}) again"
        )
    if unexpected:
        kind = type(model).__name__
        others = count(len(unexpected), "tensor")
        return (
            f"its files have {others} of a model other than {kind} (first: {unexpected[0]}); "
            f"choose a checkpoint that was saved as {kind}"
        )
    if missing == [_head(model)]:
        return (
            "if the output projection shares the embedding's values, set tie_word_embeddings to true in "
            "config.json; otherwise save or download the model again"
        )
    return "save or download the model again"


def adapter_sentence(
    model: Any, name: str, missing: Collection[str], unexpected: Collection[str]
) -> str:
    """Return a sentence on why an adapter does not fit its base; "" if it fits.

    Args:
        model: PEFT's model with the adapter loaded.
        name: Name of the adapter in that model.
        missing: Keys that the base expects and the adapter's file lacks.
        unexpected: Keys in the adapter's file that belong to no module of the base.
    """
    if model.peft_config[name].is_prompt_learning:  # its tensors belong to no module
        return ""
    base = _name_of(model)
    # As PEFT chooses those that it reports.
    prefix = getattr(model.base_model, "prefix", "")
    places = [key for key in model.state_dict() if prefix in key and name in key]
    if unexpected and len(missing) == len(places) > 0:
        return (
            f"none of the adapter's {count(len(unexpected), 'tensor')} belongs to a module of its base "
            f"{base}: the adapter names {_module(min(unexpected))}, and the base has "
            f"{_module(min(places))}; {_OTHER_BASE}"
        )
    missing = [key for key in missing if not any(part in key for part in _LOADED_ELSEWHERE)]
    return _misfit(base, missing, sorted(unexpected))


def _misfit(base: str, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """The sentence on tensors that an adapter's file lacks, or its base has no place for; empty if none."""
    if unexpected:
        tensors = count(
            len(unexpected), "tensor of the adapter belongs", "tensors of the adapter belong"
        )
        return (
            f"{tensors} to no module of its base {base} (first: {_module(unexpected[0])}); "
            f"{_OTHER_BASE}"
        )
    if missing:
        tensors = count(len(missing), "tensor of the adapter is", "tensors of the adapter are")
        first = _module(missing[0])
        return (
            f"{tensors} not in its file and would be untrained (first: {first}); "
            "save the adapter again"
        )
    return ""


def _of_other_shape(model: Any, report: Mapping[str, Collection[Any]]) -> str:
    """The sentence on tensors whose shape in the files is not the model's."""
    shapes: dict[str, Sequence[Any]] = {}  # stored and wanted; transformers 4 gives names alone
    for key in report["mismatched_keys"]:
        if isinstance(key, str):
            shapes[key] = ()
        else:
            shapes[key[0]] = key[1:]
    names = [name for name in _parameters(model) if name in shapes] or sorted(shapes)
    first = names[0]
    about = ""
    advice = "correct config.json, or save the model again"
    if shapes[first]:
        stored, wanted = shapes[first]
        about = f", {tuple(stored)} in place of {tuple(wanted)}"
        if 0 in stored:
            advice = "DeepSpeed ZeRO-3 leaves such placeholders; run its script zero_to_fp32.py"
    tensors = count(len(names), "tensor of the checkpoint does", "tensors of the checkpoint do")
    return (
        f"{tensors} not have the shape that config.json requires (first: {first}{about}); {advice}"
    )


def _missing(model: Any, reported: Collection[str]) -> list[str]:
    """The names that are ``reported`` as missing and hold weights, in the model's order.

    A buffer is computed by its class. A quantised layer holds its weights in buffers, too, and may
    compute its scales: it counts where nothing of it is stored.
    """
    names = _parameters(model)
    missing = [name for name in names if name in reported]
    if getattr(model, "hf_quantizer", None) is None or not reported:
        return missing
    names += [name for name, _ in model.named_buffers() if "weight" in name.rpartition(".")[2]]
    stored = {name.rpartition(".")[0] for name in names if name not in reported}
    return [name for name in names if name in reported and name.rpartition(".")[0] not in stored]


def _parameters(model: Any) -> list[str]:
    """All names of a model's parameters, in order; tied ones have several."""
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _head(model: Any) -> str:
    """The name of the output head's weight, the last where it is tied; empty without one."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    parameters = model.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in parameters if parameter is weight]
    return names[-1] if names else ""


def _name_of(model: Any) -> str:
    """Name or folder that a model, or an adapter's base, was loaded from."""
    return str(model.config.name_or_path)


def _module(name: str) -> str:
    """The module that an adapter's tensor is for, without PEFT's parts of its name."""
    return _ADAPTER_PART.sub("", name)
