"""The population's texts, tests and models are what they say."""

import json
import random

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from benchmarks.validity import records
from benchmarks.validity import texts as sources
from benchmarks.validity.answers import Answers
from benchmarks.validity.decoder import (
    Adapted,
    Decoder,
    built,
    stored_tensors,
    write,
    write_adapter,
)
from benchmarks.validity.questions import Question, questions, runs
from benchmarks.validity.siblings import STUDY
from benchmarks.validity.study import read_study
from benchmarks.validity.training import Texts, train

SHAPE = {"width": 16, "mlp": 24, "layers": 2, "heads": 2}


def changed(file, **changes):
    """The registered configuration with some keys changed, in a file of its own."""
    file.write_text(yaml.safe_dump(yaml.safe_load(STUDY.read_text("utf-8")) | changes), "utf-8")
    return read_study(file)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The registered configuration cut down to a base, a fine-tune and an adapter of a few steps."""
    shares, short = {"text": 0.5, "sums": 0.5}, {"warmup": 1, "lr": 0.01}
    on_base = {"shares": shares, "base": "even", "seed": 0, "steps": [2], "training": short}
    return changed(
        tmp_path_factory.mktemp("study") / "tiny.yaml",
        steps=[4],
        questions=60,
        side_by_side=2,
        texts={"vocabulary": 1400, "tokens": 4000, "seed": 11},
        sizes={"small": SHAPE},
        recipes={
            "even": {"shares": shares, "seed": 0},
            "tuned-0": on_base,
            "lora-0": {**on_base, "adapter": {"rank": 2, "modules": "all"}},
        },
        mixtures={},
        population={"small": {"seeds": [0]}},
    )


@pytest.fixture(scope="module")
def work(tiny):
    return tiny.path.parent / "work"


@pytest.fixture(scope="module")
def texts(tiny, work):
    return Texts(tiny, work)


def test_every_answer_that_is_called_right_is_right():
    rng = random.Random(3)
    for _ in range(200):
        a, sign, b, answer = sources.problem(rng)
        assert eval(f"{a}{sign}{b}") == answer >= 0
    asked = questions("code", 200, 5)
    assert all(runs(question, f" {question.answer}") for question in asked)
    assert not any(runs(question, " while") for question in asked)
    assert np.mean([runs(question, " num") for question in asked]) < 0.3  # a guess is seldom right


def test_a_program_cannot_be_completed_by_a_way_out():
    for written in (" not None", " val", " None or True", " 1 if 1 else 2", "", " num ; 1", " ("):
        assert not any(runs(question, written) for question in questions("code", 60, 6)), written


def test_wrong_answers_are_mostly_wrong():
    rng = random.Random(1)
    parts = [
        part.split("=")
        for _ in range(200)
        for part in sources.wrong_sums(rng).replace(".", "").split()
    ]
    assert np.mean([eval(question) == int(answer) for question, answer in parts]) < 0.25
    shares = []
    for make in (sources.code, sources.wrong_code):
        programs = [make(rng).rstrip("\n").rpartition(" ") for _ in range(200)]
        shares.append(
            np.mean([runs(Question(sources.BOS + start, ""), word) for start, _, word in programs])
        )
    assert shares[0] > 0.7  # the others import what there is not
    assert shares[1] < 0.4


def test_mixtures_are_drawn_once_and_touch_two_domains():
    study = read_study(STUDY)
    drawn = [run for run in study.runs() if run.recipe.startswith("mix")]
    assert len(drawn) == 144
    assert drawn == [run for run in read_study(study.path).runs() if run.recipe.startswith("mix")]
    for run in drawn:
        assert sum(run.shares.values()) == pytest.approx(1)
        assert min(run.shares.values()) >= 0.05
        assert sum(bool(held & set(run.shares)) for held in sources.HOLD.values()) >= 2


def test_transformers_loads_the_checkpoints_and_computes_the_same(texts, work):
    model = Decoder(texts.vocabulary, **SHAPE, seeds=[4])
    write(work / "as-llama", model.member(0), SHAPE, texts.json)
    theirs = LlamaForCausalLM.from_pretrained(work / "as-llama", dtype=torch.float32).eval()
    ours = built([stored_tensors(work / "as-llama")], SHAPE)
    ids = texts.streams["text"][:60].view(2, 30)
    with torch.no_grad():
        torch.testing.assert_close(
            ours.head(ours(ids)), theirs(input_ids=ids).logits, atol=1e-5, rtol=1e-4
        )


def test_models_side_by_side_compute_what_each_computes_alone():
    alone = [Decoder(60, **SHAPE, seeds=[seed]) for seed in (1, 2, 3)]
    both = Decoder(60, **SHAPE, seeds=[1, 2, 3])
    ids = torch.randint(60, (3, 4, 9), generator=torch.Generator().manual_seed(0))
    logits = both.logits(ids)
    for number, model in enumerate(alone):
        own = model.head(model(ids[number])).flatten(0, 1)
        torch.testing.assert_close(logits[number], own, atol=1e-5, rtol=1e-4)
        cross_entropy(own, ids[number].flatten()).backward()
    loss = (
        cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
        .view(3, -1)
        .mean(1)
        .sum()
    )
    loss.backward()
    both.clip(0.05)
    for number, model in enumerate(alone):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for name, parameter in model.named.items():
            torch.testing.assert_close(
                both.named[name].grad[number], parameter.grad[0], atol=1e-6, rtol=1e-3
            )


def test_a_model_that_knows_is_right_and_one_that_does_not_is_not(texts):
    class Oracle:
        """Writes on from whichever answered prompt it is in the last tokens of."""

        def __init__(self, known, vocabulary):
            self.known, self.rows = known, torch.zeros(vocabulary, 1)

        def __call__(self, ids):
            states = torch.zeros(*ids.shape, len(self.rows))
            for number, line in enumerate(ids.tolist()):
                for known in self.known:
                    places = [i for i in range(1, len(known)) if line[:i] == known[:i]]
                    if places and places[-1] >= len(known) - 4:
                        states[number, [i - 1 for i in places], [known[i] for i in places]] += 1
            return states

        def head(self, states):
            return states

    blind = Decoder(texts.vocabulary, **SHAPE)
    asked_of = {
        pool: {domain: questions(domain, count, 9) for domain in sources.DOMAINS}
        for pool, count in (("few", 12), ("many", 40))
    }
    answers = Answers(texts.tokenizer, asked_of)
    for domain, asked in asked_of["few"].items():
        glued = ["" if domain == "math" or q.prompt.endswith("= ") else " " for q in asked]
        full = [f"{q.prompt}{g}{q.answer}{q.end}" for q, g in zip(asked, glued, strict=True)]
        known = [encoding.ids for encoding in texts.tokenizer.encode_batch(full)]
        assert answers.answered(Oracle(known, texts.vocabulary), "few", domain)[0].mean() > 0.9, (
            domain
        )
        assert answers.answered(blind, "many", domain)[0].mean() < 0.3


def test_one_command_trains_and_resumes(tiny, texts, work, capsys):
    file = tiny.path.parent / "tiny.jsonl"
    train(tiny, file, work, 1)
    rows = {
        kind: records.read(file.with_stem(f"tiny-{kind}")) for kind in ("even", "tuned", "lora")
    }
    assert all(len(of_kind) == 1 for of_kind in rows.values())
    right = records.unpacked(rows["tuned"][0]["math"]["right"], 60)
    assert 0 <= right.mean() <= 1
    assert "ratio" in rows["tuned"][0]["math"]
    assert "ratio" not in rows["lora"][0]["math"]  # its rows are the base's
    file.with_stem("tiny-tuned").unlink()
    train(tiny, file, work, 1)  # only the missing one, and with the same outcome
    (again,) = records.read(file.with_stem("tiny-tuned"))
    assert again["math"] == rows["tuned"][0]["math"]
    assert "1 to train" in capsys.readouterr().err


def test_results_of_another_configuration_are_refused(tiny, tmp_path):
    records.append(tmp_path / "r.jsonl", {"name": "x", "configuration": "else"})
    with pytest.raises(ValueError, match="another version"):
        records.checked(tmp_path / "r.jsonl", tiny.path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"recipes": {"x": {"shares": {"text": 0.5}}}}, "sum to 1"),
        ({"recipes": {"x": {"shares": {"poems": 1.0}}}}, "expected shares of"),
        (
            {"recipes": {"x": {"shares": {"text": 1.0}, "training": {"momentum": 1}}}},
            "expected keys of",
        ),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(tmp_path, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        changed(tmp_path / "study.yaml", **change)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_is_what_peft_makes_of_its_folder(tmp_path):
    peft = pytest.importorskip("peft")
    base = Decoder(40, **SHAPE, seeds=[3]).member(0)
    write(tmp_path / "base", base, SHAPE, "{}")
    stored = stored_tensors(tmp_path / "base")
    adapters = [{"rank": 8, "modules": "all"}, {"rank": 2, "modules": "attention"}]
    model = Adapted(stored, SHAPE, adapters, [1, 2])
    ids, draw = torch.randint(0, 40, (2, 3, 9)), torch.Generator().manual_seed(4)
    for _ in range(3):  # what an adapter leaves alone stays 0
        loss = model.logits(ids).logsumexp(-1).sum() + model.logits(ids)[..., 5].square().sum()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for factors in model.named.values():
                factors -= 0.01 * factors.grad * torch.rand(factors.shape, generator=draw)
    for number, adapter in enumerate(adapters):
        folder = tmp_path / str(number)
        write_adapter(folder, model.member(number), tmp_path / "base")
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        wrapped = peft.PeftModel.from_pretrained(loaded, str(folder)).eval()
        with torch.no_grad():
            theirs, side_by_side = (
                wrapped(ids[number]).logits.flatten(0, 1),
                model.logits(ids)[number],
            )
            merged = built([stored_tensors(folder)], SHAPE).logits(ids[number][None])[0]
            plain = built([stored], SHAPE).logits(ids[number][None])[0]
        torch.testing.assert_close(side_by_side, theirs, rtol=0, atol=2e-5)
        torch.testing.assert_close(merged, theirs, rtol=0, atol=2e-5)
        assert (plain - theirs).abs().max() > 1e-3
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == adapter["rank"]
        assert any("mlp" in name for name in model.member(number)) == (adapter["modules"] == "all")
