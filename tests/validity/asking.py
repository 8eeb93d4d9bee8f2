"""Which questions of a domain a model answers right."""

from benchmarks.validity.answers import GLUE
from benchmarks.validity.questions import endings_read, programs_run


def answered(model, tokenizer, domain, asked):
    if domain == "code":
        return programs_run(model, tokenizer, asked)
    prompts = [tokenizer.encode(question.prompt).ids for question in asked]
    endings = [tokenizer.encode(f"{GLUE[domain]}{q.answer}{q.end}").ids for q in asked]
    return endings_read(model, prompts, endings)[0]
