"""The query's tokens: decoded they are the query, on every pre-tokenizer at hand."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from datasets_layout import DATA
from tokenizers import Tokenizer, models, trainers

from lmeval_dispersion.harness.recording import query_tokens

REAL = sorted((Path(__file__).parents[1] / "data/tokenizers").glob("*.json"))

QUERY = "A lesion of the nerve (1993) will cause:\nA. paralysis\nB.  none\nAnswer:"
PYTHON = '\ndef add(a, b):\n    """Ça va? 日本語 😀"""\n        '
PROMPTS = {  # text before, query, text after
    "description": ("The following are questions about anatomy.\n\n", QUERY, ""),
    "few shots": (f"{QUERY} B\n\n{QUERY} D\n\n", QUERY, ""),
    "first": ("", QUERY, ""),
    "one line": ("Question:\n", "What is 12 + 30?", ""),
    "code": ("Complete the function.\n\n\n", PYTHON, ""),
    "chat": ("<|user|>\n", QUERY, "<|end|>\n<|assistant|>\n"),
    "tabs": ("Frage\t\t", "größer als\tdies", " \n"),
    "within words": ("pre", "fix", "ed"),
}


def trained(file):
    """A small BPE with the real tokenizer's normalizer, pre-tokenizer, post-processor and decoder."""
    real = Tokenizer.from_file(str(file))
    bytes_too = json.loads(file.read_text("utf-8"))["model"].get("byte_fallback", False)
    core = Tokenizer(models.BPE(byte_fallback=bytes_too, unk_token="<unk>" if bytes_too else None))
    core.normalizer, core.decoder = real.normalizer, real.decoder
    if real.pre_tokenizer is not None:
        core.pre_tokenizer = real.pre_tokenizer
    if real.post_processor is not None and type(real.post_processor).__name__ == "ByteLevel":
        core.post_processor = real.post_processor
    texts = [
        *json.dumps(json.loads((DATA / "excerpts.json").read_text("utf-8"))).split("\\n")[:400]
    ]
    texts += [before + query + after for before, query, after in PROMPTS.values()] * 3
    special = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))] if bytes_too else []
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1200, special_tokens=special, show_progress=False)
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.fixture(scope="module", params=REAL, ids=lambda file: file.stem)
def tokenizer(request):
    return trained(request.param)


@pytest.mark.parametrize("name", PROMPTS)
def test_the_tokens_hold_the_query_and_the_tokens_beside_them_none_of_it(tokenizer, name):
    before, query, after = PROMPTS[name]
    prompt = before + query + after
    context = tokenizer(prompt.rstrip())["input_ids"]
    start, stop = query_tokens(tokenizer, prompt, query, context)
    assert 0 <= start < stop <= len(context)

    def text(tokens):
        return "".join(tokenizer.decode(tokens, clean_up_tokenization_spaces=False).split())

    held, core = text(context[start:stop]), "".join(query.split())
    assert core in held
    # Only a token that holds the end of one and the start of the other may bring something along, and one
    # token less on either side loses some of the query: no neighbour is counted.
    for tokens in (context[start + 1 : stop], context[start : stop - 1]):
        assert core not in text(tokens)


def test_what_is_not_there_and_what_cannot_be_told(tokenizer):
    context, other = (tokenizer(text)["input_ids"] for text in ("some words", "quite another text"))
    for query in (None, "others", "  "):
        assert query_tokens(tokenizer, "some words", query, context) == (0, len(context))
    # Tokens that are not the prompt's, or of unknown places: no figure rather than a wrong one.
    assert query_tokens(tokenizer, "some words", "words", other) == (0, 0)
    assert query_tokens(SimpleNamespace(is_fast=False), "some words", "words", context) == (0, 0)
