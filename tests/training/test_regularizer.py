"""The regularizer in every kind of loop gives the gradient that a hand-written loss gives."""

import copy
from functools import partial

import pytest
import slow_losses
import torch
from tiny_decoders import assert_same_gradients, gradients, tiny_gpt2, tiny_llama, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lmeval_dispersion.errors import CaptureError, GeometryError, NonFiniteLossError, UsageError
from lmeval_dispersion.training import losses
from lmeval_dispersion.training.regularizer import DispersionRegularizer

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
WEIGHT = 0.5


def own_loss(z, *, mask=None, segments=None):
    """A loss by plain autograd: the mean square of the real tokens' states."""
    return (z if mask is None else z[mask.bool()]).square().mean()


def by_hand(model, batch, layers, loss="angular_spread"):
    """Cross-entropy + weight x loss from ``output_hidden_states``, and the gradient of both."""
    model = copy.deepcopy(model)
    out = model(**batch, output_hidden_states=True)
    states = [out.hidden_states[k + 1] for k in layers]
    mask = batch.get("attention_mask")
    function = loss if callable(loss) else getattr(losses, loss)
    aux = WEIGHT * torch.stack([function(z, mask=mask) for z in states]).mean()
    (out.loss + aux).backward()
    return aux.detach(), gradients(model)


def batch_of(b=4, t=12):
    ids = tokens(b, t)
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    mask[1, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def evaluate(model, batch):
    model.eval()
    with torch.no_grad():
        model(**batch)
    model.train()


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
@pytest.mark.parametrize("loss", ["angular_spread", "push_away", own_loss])
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


def tiny_lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(tiny_llama(), config).train()


class Recomputed(LlamaDecoderLayer):
    """A block that is computed again in the backward pass with its hooks, as transformers had them."""

    reentrant = False

    def __call__(self, *args, **kwargs):
        call = partial(super().__call__, **kwargs)
        return (
            checkpoint(call, *args, use_reentrant=self.reentrant) if self.training else call(*args)
        )


class RecomputedReentrant(Recomputed):
    reentrant = True


def recompute(model, block=Recomputed):
    model.enable_input_require_grads()
    for layer in model.model.layers:
        layer.__class__ = block


RUNS = {
    "plain": (tiny_llama, lambda model: None),
    "LoRA": (tiny_lora, lambda model: None),
    "checkpointed": (
        tiny_llama,
        lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
    ),
    "recomputed": (tiny_llama, recompute),
    "recomputed, reentrant": (tiny_llama, partial(recompute, block=RecomputedReentrant)),
}


@pytest.mark.parametrize(("make", "prepare"), RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("mode", ["add", "inject"])
def test_the_gradient_is_the_same_however_the_model_runs(mode, make, prepare):
    """Also after an evaluation between the forward and the backward pass."""
    model, batch = make(), batch_of()
    wanted, wanted_gradients = by_hand(model, batch, [0, 1, 2])
    prepare(model)
    reg = DispersionRegularizer(model, layers="all", weight=WEIGHT, mode=mode)
    loss = model(**batch).loss
    aux = reg.pop()
    assert (aux == 0) == (mode == "inject")
    evaluate(model, batch_of(b=2, t=7))
    (loss + aux).backward()
    torch.testing.assert_close(reg.value * WEIGHT, wanted)
    assert_same_gradients(gradients(model), wanted_gradients)


def test_of_two_training_passes_the_latest_counts_or_each_where_each_is_popped():
    model, first = tiny_llama(), batch_of()
    second = {name: value.flip(0) for name, value in batch_of(b=6, t=9).items()}
    (early, early_gradients), (late, late_gradients) = (
        by_hand(model, batch, [0, 1, 2]) for batch in (first, second)
    )
    recompute(model)
    reg = DispersionRegularizer(model, layers="all", weight=WEIGHT)
    model(**first)
    model(**second)
    torch.testing.assert_close(reg.pop().detach(), late)
    ce = model(**first).loss
    both = reg.pop()
    ce = ce + model(**second).loss
    both = both + reg.pop()
    (ce + both).backward()
    torch.testing.assert_close(both.detach(), early + late)
    wanted = {name: value + late_gradients[name] for name, value in early_gradients.items()}
    assert_same_gradients(gradients(model), wanted, rtol=1e-4, atol=1e-6)


def test_evaluation_and_generation_are_never_seen():
    model, batch = tiny_gpt2(), batch_of()
    ids = batch["input_ids"]
    reg = DispersionRegularizer(model, layers="all")
    with torch.no_grad():
        model(ids)
    assert reg.pop() == 0
    evaluate(model, batch)
    assert reg.pop() == 0
    model.eval()
    model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert reg.pop() == 0
    model(ids)  # to be trained on, in the mode in which from_pretrained leaves a model
    with pytest.raises(CaptureError, match=r"evaluation mode.*call model\.train\(\)"):
        reg.pop()
    model.train()
    model(ids)
    with torch.no_grad():
        model(
            ids.flip(1)
        )  # metrics of some trainers: a second forward before the loss is put together
    kept = reg.pop()
    model(ids)
    torch.testing.assert_close(kept, reg.pop())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_evaluation_is_measured_over_all_its_tokens(compiled):
    """One pair mean over everything, by a plain loop over pairs, whatever the batches; without training."""
    model, batch = tiny_gpt2(2), batch_of()
    reg = DispersionRegularizer(model, layers="layer.0,last", mode="inject")
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    model.eval()
    with torch.no_grad(), reg.measured() as seen:
        for rows in (slice(0, 3), slice(3, 4)):
            run(**{name: value[rows] for name, value in batch.items()})
    model.train()
    out = model(**batch, output_hidden_states=True)
    for name, k in (("layer.0", 1), ("last", 2)):
        states = out.hidden_states[k].detach().double()
        wanted = -slow_losses.push_away(states, mask=batch["attention_mask"])
        assert seen[name].mean() == pytest.approx(float(wanted), abs=1e-6)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
def test_compiled_equals_eager_and_late_hooks_are_refused():
    torch._dynamo.reset()
    model, batch = tiny_gpt2(2), batch_of()
    _, wanted = by_hand(model, batch, [0, 1])
    with DispersionRegularizer(model, layers="all", weight=WEIGHT) as reg:
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):  # the second call must not be a stale copy of the first
            model.zero_grad()
            (compiled(**batch).loss + reg.pop()).backward()
            assert_same_gradients(gradients(model), wanted)
        evaluate(compiled, batch)
        assert reg.pop() == 0
    torch._dynamo.reset()
    compiled = torch.compile(tiny_gpt2(2), backend="aot_eager")
    compiled(**batch)
    late = DispersionRegularizer(compiled, layers="all")
    compiled(**batch)
    with pytest.raises(CaptureError, match=r"before torch\.compile"):
        late.pop()
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["add", "inject"])
def test_domains_are_described_for_one_pass(mode):
    model, ids = tiny_gpt2(), tokens()
    reg = DispersionRegularizer(model, "cross_domain_push_away", weight=1.0, mode=mode)
    domains = torch.tensor([0, 1, 1, 0])
    reg.describe(domains=domains)
    out = model(ids, output_hidden_states=True)
    reg.pop()
    wanted = losses.cross_domain_push_away(out.hidden_states[-1], domains=domains)
    torch.testing.assert_close(reg.value, wanted.detach())
    with pytest.raises(UsageError, match="`domains`"):  # noqa: PT012
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
    reg.step = 2
    model(ids)
    assert float(reg.pop().detach()) == values[2]


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nan_is_found_at_a_later_step_on_a_gpu():
    model, ids = tiny_gpt2().cuda(), tokens().cuda()
    reg = DispersionRegularizer(model, layers="all")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.bias[3] = float("nan")
    model(ids)
    reg.pop()
    torch.cuda.synchronize()
    model(ids)
    with pytest.raises(NonFiniteLossError, match=r"layer\.1, forward pass 0"):
        reg.pop()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": "angular_sprea"}, "did you mean angular_spread"),
        ({"layers": "middle"}, "last, all, early_half, late_half"),
        ({"weight": -0.1}, "at least 0, got -0.1"),
        ({"weight": float("nan")}, "got nan"),
        ({"mode": "hook"}, "add or inject"),
        ({"loss": "push_away", "tau": 1.0}, "got 'tau'"),
    ],
)
def test_options_that_cannot_be_used(options, said):
    with pytest.raises(UsageError, match=said):
        DispersionRegularizer(tiny_gpt2(), **options)


class Packed(nn.Module):
    """A decoder with flash-attention style arguments, which eager attention would not accept."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.norm = nn.LayerNorm(8)

    def forward(self, input_ids, seq_idx=None, cu_seq_lens_q=None):
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)


@pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens_q", "seq_idx", "describe"])
def test_packing(form):
    ids, positions = tokens(1, 12), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    segments = (positions == 0).cumsum(-1)
    model = tiny_llama() if form == "position_ids" else Packed()
    reg = DispersionRegularizer(model, weight=1.0)
    if form == "position_ids":
        states = model(ids, position_ids=positions, output_hidden_states=True).hidden_states[-1]
    elif form == "describe":
        reg.describe(segments=segments)
        states = model(ids)
    elif form == "seq_idx":
        states = model(ids, segments)  # by position
    else:
        states = model(ids, cu_seq_lens_q=torch.tensor([0, 5, 12], dtype=torch.int32))
    wanted = losses.angular_spread(states, segments=segments)
    torch.testing.assert_close(reg.pop(), wanted)
    assert abs(wanted - losses.angular_spread(states)) > 1e-6


def test_a_mask_that_says_nothing_is_refused():
    model, ids = tiny_gpt2(), tokens(2, 6)
    reg = DispersionRegularizer(model)
    four = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    model(ids, attention_mask=four)
    with pytest.raises(GeometryError, match="describe"):
        reg.pop()
    reg.describe(mask=torch.ones(2, 6))
    model(ids, attention_mask=four)
    assert reg.pop() is not None
