"""Adapters raced, emitted and verified: PEFT's own folders, loaded by lm-eval on their base."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from harness_world import COMMAND, LM_EVAL, child
from json_schemas import faults
from lmeval_screener.shortlist.accuracies import read_accuracies
from lmeval_screener.shortlist.loading import with_base
from lmeval_screener.shortlist.manifest import read_shortlist_manifest
from loras import BASE, DEMO, lora
from safetensors.torch import load_file, save_file

from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import DispersionError, HarnessError
from lmeval_dispersion.harness import seams
from lmeval_dispersion.harness.adapters import answers_as_base
from lmeval_dispersion.harness.swapping import SharedBase
from lmeval_dispersion.racing.evaluation import Evaluation
from lmeval_dispersion.racing.lineup import Named, Plan, all_named, may_cut

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # PEFT's, of transformers and torch
    pytest.mark.usefixtures("named_tasks_alone"),
]
QUIET = ("--batch_size", "16", "--device", "cpu", "-q")
UNTRAINED = (
    "answers exactly as its base: the adapter is untrained, or its weights were not loaded; "
    "check its files."
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of one base: two with skill, one untrained, one whose tensors have other names."""
    folder = tmp_path_factory.mktemp("made")
    for name, share in (("near", 0.2), ("far", 0.9), ("untrained", 0.0), ("strays", 0.9)):
        lora(folder / name, share)
    weights = folder / "strays" / "adapter_model.safetensors"
    renamed = {
        name.replace("model.layers", "other.layers"): t for name, t in load_file(weights).items()
    }
    save_file(renamed, weights)
    return folder


@pytest.fixture
def adapters(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "loras"))


def race(tasks: Path, out: Path, *places: object, more: tuple[str, ...] = ("--all",)) -> list[str]:
    given = ("--tasks", "sums", "--include_path", tasks, "--output_path", out, "--format", "json")
    return [*map(str, ("race", *places, *given)), *QUIET, *more]


def answer(capsys: pytest.CaptureFixture[str], words: list[str], code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(words) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert faults(result) == []
    return result


def results_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(next(folder.glob("results_*.json")).read_text())
    return content


def test_adapters_in_turn_on_one_base_have_the_answers_of_lm_evals_own_runs(
    in_world: Path, tasks: Path, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """LoRA, DoRA and another rank share a base that is padded; IA3 and a saved head are loaded whole."""
    import lm_eval
    import peft
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    padded = shutil.copytree(BASE, tmp_path / "padded")
    model = AutoModelForCausalLM.from_pretrained(padded)
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(padded)) + 64)
    model.save_pretrained(padded)
    places = tmp_path / "mine"
    for name, share, settings in (
        ("a", 0.3, {}), ("b", 0.9, {"use_dora": True}), ("c", 0.5, {"rank_pattern": {"q_proj": 4}}),
        ("e", 0.7, {"modules_to_save": ["norm"]}),
    ):  # fmt: skip
        lora(places / name, share, name=str(padded), **settings)
    other = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(padded),
        peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[]),
    )
    other.save_pretrained(places / "d")
    (config := places / "d" / "adapter_config.json").write_text(
        json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(padded)})
    )
    loads, load = list[str](), HFLM._create_model

    def noted(self: Any, *args: Any, **options: Any) -> None:
        loads.append(Path(options["peft"] or "base").name)
        load(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(HFLM, "_create_model", noted)
        answer(
            capsys,
            race(
                tasks,
                tmp_path / "out",
                *sorted(places.iterdir()),
                more=("--all", "--error", "1e-9", "--limit", "26", "--batch_size", "1"),
            ),
        )
    # For the block and then by turns: one base serves a, b and c until d or e takes its place.
    assert loads[:3] == ["base", "d", "e"]
    assert {*loads} == {*loads[:3]}
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    for place in [*sorted(places.iterdir()), None]:
        lm = HFLM(pretrained=str(padded), peft=place and str(place), batch_size=1, device="cpu")
        if place is None:
            lm._model.resize_token_embeddings(len(lm.tokenizer))
        (file,) = (tmp_path / "out" / (place.name if place else "padded_base_")).glob("samples_*")
        kept = {line["doc_id"]: line for line in map(json.loads, file.read_text().splitlines())}
        assert len(kept) >= 25
        asked = {"sums": sorted(kept)}
        plain = lm_eval.simple_evaluate(lm, tasks=["sums"], samples=asked, task_manager=manager)
        lines = [json.loads(seams.logged_line(sample)) for sample in plain["samples"]["sums"]]
        assert kept == {line["doc_id"]: line for line in lines}
        content, adapter = results_of(file.parent), {} if place is None else {"peft": str(place)}
        assert content["config"]["model_args"] == {"pretrained": str(padded), "peft": ""} | adapter
        assert content["model_name"] == str(place or padded)


def test_adapters_race_in_the_order_of_a_first_block_with_their_base(
    in_world: Path, tasks: Path, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shutil.rmtree(adapters / "strays")
    words = race(tasks, tmp_path / "out", adapters, more=("--domain", "math"))
    result = answer(capsys, words)
    assert (result["of"], result["loaded"]) == (3, 3)
    assert (result["questions_each"], result["questions_all"]) == (40, 4 * 40)  # the base's as well
    rows = {c["label"]: c for c in result["checkpoints"]}
    base = rows["sums-20 (base)"]
    assert (base["status"], base["questions"]) == ("base", 40)
    assert base["score"] == rows["untrained"]["score"] or rows["untrained"]["questions"] < 40
    assert result["best"] != base["label"]
    samples = {
        label: [
            json.loads(line)["doc_id"]
            for line in next((tmp_path / "out" / folder).glob("samples_*")).open()
        ]
        for label, folder in {
            **{label: label for label in rows},
            base["label"]: "sums-20_base_",
        }.items()
    }
    blocks = {tuple(sorted(asked[:25])) for asked in samples.values()}
    assert len(blocks) == 1
    assert sum(map(len, samples.values())) == result["questions"]
    monkeypatch.setattr(seams, "loaded_lm", None)
    again = answer(capsys, words)
    assert [c["outcome"] for c in again["checkpoints"]] == [
        c["outcome"] for c in result["checkpoints"]
    ]
    assert answer(capsys, words)["questions"] == result["questions"]


def test_one_that_answers_as_its_base_is_named_and_one_that_does_not_reach_it_is_refused(
    in_world: Path, tasks: Path, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from lm_eval.models.huggingface import HFLM

    loaded, load = list[str](), HFLM._create_model

    def noted(self: Any, *args: Any, **options: Any) -> None:
        loaded.append(Path(options["peft"]).name if options["peft"] else "")
        load(self, *args, **options)

    monkeypatch.setattr(HFLM, "_create_model", noted)
    shutil.copytree(adapters / "untrained", adapters / "untrained-2")
    words = race(tasks, tmp_path / "out", adapters, BASE)
    for _ in range(2):  # again: all but the failed one is kept
        loaded.clear()
        result = answer(capsys, words, 3)
        assert set(loaded) == {""}
        both = (
            "untrained and untrained-2 answer exactly as their base: these adapters are untrained, or their "
            "weights were not loaded; check their files."
        )
        assert result["notes"] == [both]
        (failed,) = (c for c in result["checkpoints"] if c["status"] == "failed")
        assert failed["label"] == "strays"
        assert failed["message"] == (
            f"none of the adapter's 42 tensors belongs to a module of its base {BASE}: the adapter names "
            "other.layers.0.mlp.down_proj, and the base has model.layers.0.mlp.down_proj; write the "
            "base that the adapter was trained on into adapter_config.json, or save the adapter again"
        )


def test_a_base_that_is_there_takes_the_next_adapter_without_a_word(
    made: Path, recwarn: pytest.WarningsRecorder
) -> None:
    models, warnings.filters[:] = SharedBase(), [("default", None, Warning, None, 0)]
    names = ("", "near", "strays", "far")
    places = [{"pretrained": str(BASE), "peft": name and str(made / name)} for name in names]
    lm = models.loaded("hf", places[0], lambda _: None, device="cpu")
    assert models.loaded("hf", places[1], lambda _: None, device="cpu") is lm
    with pytest.raises(HarnessError, match="none of the adapter's 42 tensors"):
        models.loaded("hf", places[2], lambda _: None, device="cpu")
    assert lm.peft == places[2]["peft"]  # near has left the base
    assert models.loaded("hf", places[3], lambda _: None, device="cpu").peft == places[3]["peft"]
    assert not [warning for warning in recwarn if warning.category is FutureWarning]


def test_one_logit_decides_whether_it_answers_as_its_base(tmp_path: Path) -> None:
    rank = {"use_rslora": True, "rank_pattern": {"q_proj": 4}}
    heads = {"target_modules": ["lm_head"]}  # of which no block knows
    for number, (share, settings, same) in enumerate(
        (
            (0.0, rank, True),
            (0.3, rank, False),
            (0.3, {"use_dora": True}, False),
            (0.001, heads, False),
        )
    ):
        place = lora(tmp_path / str(number), share, **settings)
        lm = seams.loaded_lm(
            "hf", with_base({"pretrained": str(place)}), lambda _: None, device="cpu"
        )
        assert answers_as_base(lm, "7+5=12. 13+14=") is same
    assert not answers_as_base(
        seams.loaded_lm("hf", {"pretrained": str(BASE)}, lambda _: None), "7+5="
    )


def test_arguments_are_the_bases_with_the_adapter_as_peft(adapters: Path, tmp_path: Path) -> None:
    far = adapters / "far"
    plain = {"pretrained": str(BASE), "peft": str(far)}
    assert with_base({"pretrained": str(far), "dtype": "float32"}) == plain | {"dtype": "float32"}
    whole = {"pretrained": str(BASE), "revision": "main", "dtype": "float32"}
    given = ({"pretrained": str(BASE), "peft": str(far)}, {"model": "far"}, whole)
    assert [with_base(arguments) for arguments in given] == [*given]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert with_base({"pretrained": str(far)}) == plain
        shutil.copy(BASE / name, far / name)
    assert with_base({"pretrained": str(far)}) == plain | {"tokenizer": str(far)}
    assert with_base({"pretrained": str(far), "tokenizer": "mine"}) == plain | {"tokenizer": "mine"}
    for base, why in (
        ("/none/base", "a path on the machine that trained"),
        ("", "does not name the base"),
    ):
        settings = json.loads((far / "adapter_config.json").read_text())
        text = json.dumps(settings | {"base_model_name_or_path": base})
        (far / "adapter_config.json").write_text(text)
        with pytest.raises(DispersionError, match=why):
            with_base({"pretrained": str(far)})
    shutil.copytree(
        BASE, far, dirs_exist_ok=True
    )  # a whole model in the same folder is what counts
    assert with_base({"pretrained": str(far)}) == {"pretrained": str(far)}
    with pytest.raises(HarnessError, match="the model dummy does not load adapters"):
        seams.loaded_lm("dummy", plain, lambda _: None)


def test_a_block_of_adapters_has_their_base_once(adapters: Path) -> None:
    near, far = (str(adapters / name) for name in ("near", "far"))
    listed = all_named(Named.of([near, far]), api=False)
    listed = listed._replace(entries=[each._replace(chosen="block") for each in listed.entries])
    raced = listed.joined(all_named(Named.of([near]), api=False)).ordered(listed.by, shared=True)
    assert raced.by == "block"
    assert [(e.label, e.chosen) for e in raced.entries] == [
        ("sums-20 (base)", "base"), ("near", "named"), ("far", "block"),
    ]  # fmt: skip
    again = raced.joined(all_named(Named.of([far]), api=False)).ordered(raced.by, shared=True)
    assert [e.chosen for e in again.entries] == ["base", "named", "named"]
    merged = all_named(Named.of([near, far, str(DEMO / "sums-30")]), api=False).ordered(
        None, shared=True
    )
    assert [e.label for e in merged.entries] == ["sums-20 (base)", "near", "far", "sums-30"]
    for lineup, loads in (
        (raced, ": 1 model load (for 2 checkpoints; "),
        (merged, ": 5 model loads (for 3 checkpoints; "),
    ):  # the merge twice, then the base again
        plan = Plan.of(lineup, lineup.entries, 40, budget=None, api=False)
        assert loads in plan.forecast(1.0, 0.0)
    spent = Plan.of(raced, raced.entries, 40, budget=60, api=False)
    assert spent.resident  # the base and its adapters: two thirds stay in each phase
    assert spent.expected == (60, 60)
    assert "ask 60 questions, with 1 load in" in spent.words()
    assert may_cut([*listed.entries] * 12)
    assert not may_cut([*raced.entries] * 12)  # some were named


class Engines:
    """A stand-in for vLLM: what engines are asked for, and adapters as they would be saved for them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.loads = list[Any]()
        request = SimpleNamespace(LoRARequest=lambda *given: given)
        for module in ("vllm", "vllm.lora", "vllm.lora.request"):
            monkeypatch.setitem(sys.modules, module, request)
        monkeypatch.setattr(seams, "loaded_lm", self.load)
        self.models = SharedBase()

    def load(self, name: str, given: Any, check: Any, **settings: Any) -> Any:
        self.loads.append((name, given, settings))
        return SimpleNamespace(lora_request="none")

    def adapter(self, name: str, *modules: str, **settings: Any) -> str:
        """The folder of a LoRA of these modules."""
        place = self.folder / name
        place.mkdir()
        content = {"peft_type": "LORA", **settings}
        (place / "adapter_config.json").write_text(json.dumps(content))
        names = [f"base_model.model.layers.0.{module}.lora_A.weight" for module in modules]
        save_file({name: torch.ones(1, 1) for name in names}, place / "adapter_model.safetensors")
        return str(place)

    def asked(self, adapter: str) -> Any:
        """The request that an adapter's questions would bring."""
        given = {"pretrained": "base", "peft": adapter}
        return self.models.loaded("vllm", given, lambda _: None, batch_size="auto").lora_request


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    return Engines(tmp_path, monkeypatch)


def test_on_vllm_adapters_share_an_engine_with_room_for_them_and_not_for_the_head(
    engines: Engines,
) -> None:
    """Each adapter has a number of its own; a larger rank, or another module, another engine."""
    places = [
        engines.adapter("a", "mlp.up_proj", r=8),
        engines.adapter("b", "attn.q_proj", r=4, rank_pattern={"q_proj": 16}),
        engines.adapter("c", "attn.c_attn", "attn.q_proj", r=40),
    ]
    asked = [engines.asked(place) for place in ("", *places, places[0])]
    numbered = enumerate([*places, places[0]], 2)
    assert asked == [None, *((place, number, place) for number, place in numbered)]
    common = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    lora = {"pretrained": "base", "enable_lora": True}
    room = [
        {**lora, "max_lora_rank": 16, "lora_target_modules": common},
        {**lora, "max_lora_rank": 64, "lora_target_modules": ["c_attn", *common]},
    ]
    assert engines.loads == [("vllm", given, {"batch_size": "auto"}) for given in room]


@pytest.mark.parametrize(
    ("module", "settings", "cause"),
    [
        ("lm_head", {}, "changes lm_head, a change that vLLM ignores"),
        ("q_proj", {"modules_to_save": ["lm_head"]}, "expected a plain LoRA"),
        ("q_proj", {"bias": "all"}, "expected a plain LoRA"),
        ("q_proj", {"peft_type": "IA3"}, "expected a plain LoRA"),
        ("q_proj", {"trainable_token_indices": [1]}, "expected a plain LoRA"),
    ],
)
def test_on_vllm_what_it_would_leave_out_is_refused(
    module: str, settings: dict[str, Any], cause: str, engines: Engines
) -> None:
    with pytest.raises(HarnessError, match=f"{cause}.*use the model hf"):
        engines.asked(engines.adapter("a", module, **settings))
    assert not engines.loads


def test_a_vllm_that_cannot_leave_the_head_alone_is_a_sentence(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log-likelihoods of adapters would be wrong, or it fails (vLLM's issues 16668, 51594)."""

    def load(*given: Any, **settings: Any) -> Any:
        raise TypeError("EngineArgs.__init__() got an unexpected argument 'lora_target_modules'")

    monkeypatch.setattr(seams, "loaded_lm", load)
    with pytest.raises(HarnessError, match=r"not accept lora_target_modules.*pip install -U vllm"):
        engines.asked("")


@pytest.fixture
def served(hub: Any, made: Path, tmp_path: Path) -> dict[str, str]:
    """A base and two adapters on the Hub: the commit of each."""
    base = shutil.copytree(BASE, tmp_path / "hub" / "base")
    commits = {"base": hub.add("org/base", base)}
    for name, share in (("near", 0.2), ("far", 0.9)):
        place = lora(tmp_path / "hub" / name, share, name="org/base")
        commits[name] = hub.add(f"me/{name}", place)
    return commits


def test_on_the_hub_adapter_and_base_keep_the_commits_that_were_loaded_first(
    in_world: Path, tasks: Path, hub: Any, served: dict[str, str], made: Path, tmp_path: Path,
    in_process: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    words = race(tasks, tmp_path / "out", "me/far")
    ask = Evaluation.ask

    asked = []

    def interrupted(self: Any, lm: Any, places: Any) -> Any:
        if asked:
            raise KeyboardInterrupt
        asked.append(lm)
        return ask(self, lm, places)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "ask", interrupted)
        assert in_process(*words, endpoint=hub.endpoint, main=main).returncode == 130
    hub.add("me/far", lora(tmp_path / "hub" / "other", 0.0, name="org/base"))
    hub.add("org/base", shutil.copytree(DEMO / "sums-00", tmp_path / "hub" / "new"))
    for home in ("hf", "elsewhere"):  # where nothing was downloaded before, as well
        shutil.copytree(tmp_path / "out", tmp_path / home / "out")
        words = race(tasks, tmp_path / home / "out", "me/far")
        done = in_process(*words, endpoint=hub.endpoint, home=home, main=main)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)["checkpoints"]
        content = results_of(tmp_path / home / "out" / "me_far")
        place = f"me/far@{served['far']}"
        assert content["config"]["model_args"] == {
            "pretrained": "org/base", "revision": served["base"], "peft": place
        }  # fmt: skip
        assert content["model_name"] == "me/far"
    local = answer_of(in_process, race(tasks, tmp_path / "local", made / "far"), hub)
    assert row["score"] == local["checkpoints"][0]["score"]


def answer_of(in_process: Any, words: list[str], hub: Any) -> dict[str, Any]:
    done = in_process(*words, endpoint=hub.endpoint, main=main)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_list_with_adapters_is_raced_by_its_script_evaluated_by_its_files_and_verified(
    in_world: Path, tasks: Path, hub: Any, served: dict[str, str], made: Path, tmp_path: Path,
    in_process: Any,
) -> None:  # fmt: skip
    lists = tmp_path / "list"
    lora(local := tmp_path / "mine", 0.5)
    places = ("me/near", "me/far", local, DEMO / "sums-00")
    given = ("--shortlist", 4, "--emit", lists, "--tasks", "sums", "-q", "--base", "org/base")
    done = in_process(*places, "--domain", "math", *given, endpoint=hub.endpoint)
    assert done.returncode == 0, done.stderr
    configs = {f.stem[4:]: yaml.safe_load(f.read_text()) for f in (lists / "models").glob("*.yaml")}
    on = {"pretrained": "org/base", "revision": served["base"]}
    assert {name: config["model_args"] for name, config in configs.items()} == {
        "me_near": on | {"peft": "adapters/me/near"},
        "me_far": on | {"peft": "adapters/me/far"},
        "mine": {"pretrained": str(BASE), "peft": str(local)},
        "sums-00": {"pretrained": str(DEMO / "sums-00")},
    }
    # As a user runs it, and as a job of the Slurm array does.
    bin_folder = Path(sys.executable).parent
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dispersion").write_text(f"#!{sys.executable}\n{COMMAND}")
    (tmp_path / "bin" / "dispersion").chmod(0o755)
    variables = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    variables["PATH"] = f"{tmp_path}/bin:{bin_folder}:/usr/bin:/bin"
    all_asked = (
        "--error",
        "1e-9",
        "--include_path",
        tasks,
        "--device",
        "cpu",
        "--batch_size",
        1,
        "-q",
    )
    child("bash", lists / "run.sh", *all_asked, **variables)
    assert (lists / "adapters" / "me" / "far" / "adapter_model.safetensors").is_file()
    raced = {
        file.parent.name: json.loads(file.read_text())
        for file in lists.glob("race/*/results_*.json")
    }
    assert raced["me_far"]["config"]["model_args"] == on | {
        "peft": str(lists / "adapters" / "me" / "far")
    }
    assert raced.keys() == {"me_near", "me_far", "mine", "sums-00"}
    file = next((lists / "models").glob("*far.yaml"))
    words = (
        "--config",
        file.relative_to(lists),
        "--include_path",
        tasks,
        "--device",
        "cpu",
        "--batch_size",
        1,
    )
    child(sys.executable, "-c", LM_EVAL, "run", *words, cwd=lists, **variables)
    targets = [c.target for c in read_shortlist_manifest(lists).candidates]
    whole = {*configs} - {"sums-00"}  # which no answer that is left could bring to the first
    for results, known in (("race", whole), ("results", {"me_far"})):
        rated = read_accuracies(str(lists / results)).of(targets)
        found = {t.label.replace("/", "_"): t.accuracy for t in rated if t.accuracy is not None}
        assert found.keys() == known
        assert found["me_far"] == raced["me_far"]["race"]["score"]
    done = in_process(
        "verify", lists, lists / "race", "--format", "json", endpoint=hub.endpoint, main=main
    )
    assert done.returncode == 0, done.stderr
