"""Running requests for their states: on lm-eval's model for transformers, or on an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness import requests
from lmeval_dispersion.harness.compat import plain, state_of
from lmeval_dispersion.harness.engines.engine import CHECKED, Agreement, Engine, agreement
from lmeval_dispersion.harness.engines.inputs import model_inputs
from lmeval_dispersion.harness.engines.parts import Prefill, Seen
from lmeval_dispersion.harness.engines.shared_prefix import SharedContextRecorder, SharedPromptRecorder
from lmeval_dispersion.harness.records import DocState


def on_transformers(lm: Any, *, share: bool = True) -> Prefill:
    """Runs requests on lm-eval's model: its tokens, cuts and batches, beginnings that prompts share once."""

    def prefill(instances: Sequence[Instance]) -> list[Seen]:
        kind, layers = instances[0].request_type, requests.layers_of(instances)
        if not share:
            answers = requests.prefilled(lm, instances)
        elif kind == requests.REQUEST_TYPES["loglikelihood"]:
            queries = [(r.args[0], getattr(r, "query", None)) for r in instances]
            answers = requests.scored(lm, instances, SharedContextRecorder(lm, layers, queries))
        elif kind == requests.REQUEST_TYPES["generate_until"]:
            answers = requests.generated(lm, instances, SharedPromptRecorder(lm, layers, instances))
        else:
            answers = requests.prefilled(lm, instances)
        return [_seen(answer) for answer in answers]

    return prefill


def on_engine(engine: Engine, lm: Any) -> Prefill:
    """Runs the tokens that lm-eval's model would be given on an engine; perplexities and answers are NaN."""

    def prefill(instances: Sequence[Instance]) -> list[Seen]:
        inputs = model_inputs(lm, instances)
        flat = [tokens for one in inputs for tokens in one.tokens]
        # Equal segments and cut prompts run once; the longest first, so that what does not fit fails at once.
        unique = sorted({tuple(tokens) for tokens in flat}, key=lambda tokens: (-len(tokens), tokens))
        states = engine.states(unique) if unique else np.empty((0, 0), dtype=np.float32)
        of_tokens = dict(zip(unique, states, strict=True))
        found = []
        for instance, one in zip(instances, inputs, strict=True):
            for wanted, tokens in zip(one.wanted, one.tokens, strict=True):
                wanted.vectors[engine.layer] = of_tokens[tuple(tokens)]
            state: DocState = requests.state_for(instance, one.wanted)
            state.perplexity = [math.nan] * len(one.wanted)
            found.append(Seen(state, math.nan))
        return found

    return prefill


def check_engine(
    engine: Engine, lm: Any, instances: Sequence[Instance]
) -> tuple[Agreement | None, dict[int, Seen]]:
    """Run some requests on both.

    Args:
        engine: The engine.
        lm: lm-eval's model, with the same weights.
        instances: Requests to choose from, of any type.

    Returns:
        How far the states are from each other (None where no request has a state), and what transformers
        alone brought back, by the request's place.
    """
    order = sorted(range(len(instances)), key=lambda i: (len(instances[i].args[0]), i))
    places = np.linspace(0, len(order) - 1, min(CHECKED, len(order))).round().astype(int)
    chosen = [order[place] for place in places]
    by_hf, by_engine = on_transformers(lm, share=False), on_engine(engine, lm)
    alone: dict[int, Seen] = {i: by_hf([instances[i]])[0] for i in chosen}
    found: dict[int, Seen] = {}
    batched: dict[int, Seen] = {}
    for kind in sorted({instances[i].request_type for i in chosen}):
        same = [i for i in chosen if instances[i].request_type == kind]
        part = [instances[i] for i in same]
        found.update(zip(same, by_engine(part), strict=True))
        batched.update(zip(same, by_hf(part), strict=True))
    having = [i for i in chosen if alone[i].state.vectors]
    if not having:
        return None, alone
    rows = [
        np.concatenate([run[i].state.vectors[engine.layer] for i in having])
        for run in (found, alone, batched)
    ]
    return agreement(*rows), alone


def _seen(answer: Any) -> Seen:
    state = state_of(answer)
    if state is None:
        raise HarnessError("a prompt came back without its state; report this with your versions")
    value = plain(answer)
    return Seen(state, value[0] if isinstance(value, tuple) else value)
