"""The regularizer in every kind of loop gives the gradient that a hand-written loss gives."""

import copy

import pytest
import torch
from tiny_decoders import assert_same_gradients, gradients, tiny_gpt2, tiny_llama, tokens
from transformers import GPT2LMHeadModel

from lmeval_dispersion.errors import CaptureError, NonFiniteLossError, UsageError
from lmeval_dispersion.training import losses
from lmeval_dispersion.training.regularizer import DispersionRegularizer

WEIGHT = 0.5


def by_hand(model, batch, layers, loss, **options):
    """Cross-entropy + weight x loss from ``output_hidden_states``, and the gradient of both."""
    model = copy.deepcopy(model)
    out = model(**batch, output_hidden_states=True)
    states = [out.hidden_states[k + 1] for k in layers]
    mask = batch.get("attention_mask")
    aux = WEIGHT * torch.stack([getattr(losses, loss)(z, mask=mask, **options) for z in states]).mean()
    (out.loss + aux).backward()
    return aux.detach(), gradients(model)


def batch_of(b=4, t=12, padded=True):
    ids = tokens(b, t)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 8:] = 0
        mask[1, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
@pytest.mark.parametrize(
    ("layers", "indices", "names"),
    [
        ("last", [2], ["last"]),
        ("all", [0, 1, 2], ["layer.0", "layer.1", "last"]),
        ([0, -2], [0, 1], ["layer.0", "layer.1"]),
        ("layer.-3,last", [0, 2], ["layer.0", "last"]),
    ],
)
@pytest.mark.parametrize("loss", ["angular_spread", "push_away"])
def test_equals_hidden_states_by_hand(make, layers, indices, names, loss):
    model, batch = make(), batch_of()
    wanted, wanted_gradients = by_hand(model, batch, indices, loss)
    with DispersionRegularizer(model, loss, layers=layers, weight=WEIGHT) as reg:
        out = model(**batch)
        aux = reg.pop()
        (out.loss + aux).backward()
    torch.testing.assert_close(aux.detach(), wanted)
    assert_same_gradients(gradients(model), wanted_gradients)
    assert list(reg.values) == reg.layers == names
    torch.testing.assert_close(reg.value * WEIGHT, aux.detach())


def test_evaluation_and_generation_are_never_seen():
    model, ids = tiny_gpt2(), tokens()
    reg = DispersionRegularizer(model, layers="all")
    with torch.no_grad():
        model(ids)
    assert reg.pop() == 0
    model.eval()
    with torch.no_grad():
        model(ids)
    assert reg.pop() == 0
    model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert reg.pop() == 0
    model.train()
    model(ids)
    with torch.no_grad():
        model(ids.flip(1))  # metrics of some trainers: a second forward before the loss is put together
    kept = reg.pop()
    model(ids)
    torch.testing.assert_close(kept, reg.pop())


def test_a_model_as_from_pretrained_gives_it_trains_or_is_told_to(tmp_path):
    tiny_gpt2().save_pretrained(tmp_path)
    model, batch = GPT2LMHeadModel.from_pretrained(tmp_path), batch_of()
    reg = DispersionRegularizer(model, layers="all")
    loss = model(**batch).loss
    with pytest.raises(CaptureError, match=r"evaluation mode.*call model\.train\(\)"):
        loss + reg.pop()
    model.train()
    (model(**batch).loss + reg.pop()).backward()
    assert reg.value is not None


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_of_two_training_passes_the_latest_counts_or_each_where_each_is_popped(checkpointed):
    model, first = tiny_llama(), batch_of()
    second = {name: value.flip(0) for name, value in batch_of(b=6, t=9).items()}
    (one, one_gradients), (two, two_gradients) = (
        by_hand(model, batch, [0, 1, 2], "angular_spread") for batch in (first, second)
    )
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    reg = DispersionRegularizer(model, layers="all", weight=WEIGHT)
    ce = model(**first).loss
    ce = ce + model(**second).loss
    latest = reg.pop()
    torch.testing.assert_close(latest.detach(), two)
    model.zero_grad()
    ce = model(**first).loss
    both = reg.pop()
    ce = ce + model(**second).loss
    both = both + reg.pop()
    (ce + both).backward()
    torch.testing.assert_close(both.detach(), one + two)
    wanted = {name: value + two_gradients[name] for name, value in one_gradients.items()}
    assert_same_gradients(gradients(model), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_injected_gradients_survive_an_evaluation_before_the_backward_pass(reentrant):
    model, batch = tiny_llama(), batch_of()
    _, wanted = by_hand(model, batch, [0, 1, 2], "angular_spread")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    DispersionRegularizer(model, layers="all", weight=WEIGHT, mode="inject")
    loss = model(**batch).loss
    model.eval()
    with torch.no_grad():
        model(**batch_of(b=2, t=7))
    model.train()
    loss.backward()
    assert_same_gradients(gradients(model), wanted)


@pytest.mark.parametrize(
    ("mode", "compiled"),
    [("add", False), ("inject", False), pytest.param("inject", True, marks=pytest.mark.slow)],
)
def test_evaluation_is_measured_over_all_its_tokens(mode, compiled):
    """One pair mean over everything, by a plain loop over pairs, whatever the batches; without training."""
    model, batch = tiny_gpt2(2), batch_of(padded=True)
    reg = DispersionRegularizer(model, layers="layer.0,last", mode=mode)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    model.eval()
    with torch.no_grad(), reg.measured() as seen:
        for rows in (slice(0, 3), slice(3, 4)):
            run(**{name: value[rows] for name, value in batch.items()})
    model.train()
    model(**batch)
    out = model(**batch, output_hidden_states=True)
    for name, k in (("layer.0", 1), ("last", 2)):
        points = out.hidden_states[k][batch["attention_mask"] == 1].detach().double()
        distances = [
            1 - float(torch.nn.functional.cosine_similarity(a, b, dim=0))
            for i, a in enumerate(points)
            for j, b in enumerate(points)
            if i != j
        ]
        assert seen[name].mean() == pytest.approx(sum(distances) / len(distances), abs=1e-6)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("mode", ["add", "inject"])
def test_checkpointing_changes_nothing(mode, reentrant):
    model, batch = tiny_llama(), batch_of()
    wanted, wanted_gradients = by_hand(model, batch, [0, 1, 2], "angular_spread")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    reg = DispersionRegularizer(model, layers="all", weight=WEIGHT, mode=mode)
    loss = model(**batch).loss
    aux = reg.pop()
    assert (aux == 0) == (mode == "inject")
    (loss + aux).backward()
    torch.testing.assert_close(reg.value * WEIGHT, wanted)
    assert_same_gradients(gradients(model), wanted_gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
def test_compiled_equals_eager_and_late_hooks_are_refused():
    torch._dynamo.reset()
    model, batch = tiny_gpt2(2), batch_of()
    _, wanted = by_hand(model, batch, [0, 1], "angular_spread")
    with DispersionRegularizer(model, layers="all", weight=WEIGHT) as reg:
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):  # the second call must not be a stale copy of the first
            model.zero_grad()
            (compiled(**batch).loss + reg.pop()).backward()
            assert_same_gradients(gradients(model), wanted)
        compiled.eval()
        with torch.no_grad():
            compiled(**batch)
        assert reg.pop() == 0
    torch._dynamo.reset()
    model = tiny_gpt2(2)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(**batch)
    late = DispersionRegularizer(compiled, layers="all")
    compiled(**batch)
    with pytest.raises(CaptureError, match=r"before torch\.compile"):
        late.pop()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_peft():
    peft = pytest.importorskip("peft")
    base, batch = tiny_gpt2(), batch_of()
    config = peft.LoraConfig(target_modules=["c_attn"], r=2, init_lora_weights=False, fan_in_fan_out=True)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config).train()
    _, wanted = by_hand(model, batch, [0, 1, 2], "angular_spread")
    reg = DispersionRegularizer(model, layers="all", weight=WEIGHT)
    (model(**batch).loss + reg.pop()).backward()
    assert_same_gradients(gradients(model), wanted)
    assert all("lora" in name for name in wanted)


@pytest.mark.parametrize("mode", ["add", "inject"])
def test_domains_are_told_of_one_pass(mode):
    model, ids = tiny_gpt2(), tokens()
    reg = DispersionRegularizer(model, "cross_domain_push_away", weight=1.0, mode=mode)
    domains = torch.tensor([0, 1, 1, 0])
    reg.describe(domains=domains)
    out = model(ids, output_hidden_states=True)
    reg.pop()
    wanted = losses.cross_domain_push_away(out.hidden_states[-1], domains=domains)
    torch.testing.assert_close(reg.value, wanted.detach())
    with pytest.raises(UsageError, match="one number a sequence"):  # noqa: PT012
        model(ids)
        reg.pop()


def test_draws_repeat_from_a_step_on():
    model, ids = tiny_gpt2(), tokens(2, 30)
    reg = DispersionRegularizer(model, layers="all", max_tokens=5, seed=7)
    values = []
    for _ in range(3):
        model(ids)
        values.append(float(reg.pop().detach()))
    assert len(set(values)) == 3
    again = DispersionRegularizer(model, layers="all", max_tokens=5, seed=7)
    again.step = 2
    model(ids)
    assert float(again.pop().detach()) == values[2]


@pytest.mark.parametrize("mode", ["add", "inject"])
def test_nan_names_layer_and_step(mode):
    model, ids = tiny_gpt2(), tokens()
    reg = DispersionRegularizer(model, layers="all", mode=mode)
    model(ids)
    reg.pop()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.bias[3] = float("nan")
    with pytest.raises(NonFiniteLossError, match=r"layer\.1, forward pass 1") as caught:  # noqa: PT012
        model(ids)
        reg.pop()
    assert (caught.value.layer, caught.value.step) == ("layer.1", 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": "angular_sprea"}, "did you mean angular_spread"),
        ({"layers": "middle"}, "last, all, early_half, late_half"),
        ({"weight": -0.1}, "at least 0, got -0.1"),
        ({"weight": float("nan")}, "got nan"),
        ({"mode": "hook"}, "add, inject"),
        ({"loss": "push_away", "tau": 1.0}, "got 'tau'"),
    ],
)
def test_options_that_cannot_be_used(options, said):
    with pytest.raises(UsageError, match=said):
        DispersionRegularizer(tiny_gpt2(), **options)
