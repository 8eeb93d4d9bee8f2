"""Metrics of tasks and groups: over which documents they are, and when they are not defined."""

import json
import math
import pickle
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness_world import ARC, records

from lmeval_dispersion.geometry import dispersion, dispersion_estimate
from lmeval_dispersion.harness import recording
from lmeval_dispersion.harness.records import AggregatedMetric, DocRecord, DocState
from lmeval_dispersion.harness.task import DispersionTask
from lmeval_dispersion.store import read_store


def matrix(records):
    """The last states of records, (n, d)."""
    return np.concatenate([record.state.vectors["last"] for record in records])


@pytest.mark.parametrize(
    ("name", "leaves", "categories"),
    [
        ("mmlu_stem_dispersion", 19, {"stem"}),
        pytest.param(
            "mmlu_dispersion",
            57,
            {"stem", "other", "social sciences", "humanities"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_groups_are_pooled_over_all_documents(name, leaves, categories, world, tmp_path):
    results = world.run(world.lm(batch_size=16), name, store=tmp_path, layers="last+layer.0")
    tasks = list(results["samples"])
    assert len(tasks) == leaves
    every = [record for task in tasks for record in records(results, task)]
    rows = matrix(every)
    right = np.array([record.correct for record in every]) == 1.0
    group = results["groups"][name]
    expected = dispersion_estimate(rows)
    for key, value in (
        ("dispersion", expected.mean),
        ("dispersion_stderr", expected.se),
        ("dispersion_correct", dispersion(rows[right])),
        ("dispersion_incorrect", dispersion(rows[~right])),
    ):
        assert group[f"{key},none"] == pytest.approx(value, rel=1e-9), key
    mean_of_means = np.mean([results["results"][task]["dispersion,none"] for task in tasks])
    assert abs(group["dispersion,none"] - mean_of_means) > 1e-3
    store = read_store(tmp_path)
    assert len(store.documents) == len(every) == 4 * leaves
    assert set(store.documents["category"]) == categories
    assert store.documents["subject"].nunique() == leaves
    assert store.layers == ["last", "layer.0"]
    order = {record.columns["doc_hash"]: i for i, record in enumerate(every)}
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    picked = units[[order[h] for h in store.documents["doc_hash"]]]
    np.testing.assert_allclose(store.vectors("last"), picked, atol=1e-3)
    assert store.documents["query_perplexity"].between(1, 1e6).all()
    assert store.documents["correct"].mean() == pytest.approx(group["acc,none"])
    assert store.documents["text"].str.endswith("Answer:").mean() > 0.9  # longer ones are shortened
    assert set(store.documents["prediction"]) <= set("ABCD")


@pytest.mark.slow
def test_a_group_of_generations_in_chats_is_pooled(world):
    settings = {"gen_kwargs": {"max_gen_toks": 2}, "apply_chat_template": True, "limit": 1}
    group = "mmlu_th_llama_dispersion"
    thai = world.run(
        world.lm(batch_size=16), group, families=("llama3/instruct/mmlu_th",), **settings
    )
    assert len(thai["samples"]) == 57
    rows = matrix(record for task in thai["samples"] for record in records(thai, task))
    assert thai["groups"][group]["dispersion,strict_match"] == pytest.approx(
        dispersion(rows), rel=1e-9
    )


def test_nan_states_are_left_out_and_said(world, caplog):
    lm = world.lm()
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[lm.tok_encode(" bees")[0]] = float("nan")
    results = world.run(lm)
    metadata = results["configs"][ARC]["metadata"]["dispersion"]
    bad = metadata["without_direction"]["last"]
    assert 0 < bad < 8
    assert metadata["layers"]["last"]["dispersion_n"] == 8 - bad
    assert math.isfinite(results["results"][ARC]["dispersion,none"])
    assert re.search(rf"{bad} of 8 states of last (is|are) zero or not finite", caplog.text)


def test_records_of_other_processes_are_kept_whatever_samples_of_them_are_drawn(
    world, tmp_path, monkeypatch
):
    lm = world.lm()
    items = records(world.run(lm, store=tmp_path / "plain"), ARC)
    dumped = DispersionTask.dump_config

    def gathered(self):
        if not self._summary:
            figure = self.aggregation()["dispersion"]
            for sample in (items, random.Random(1).choices(items, k=8)):
                copied, records = pickle.loads(
                    pickle.dumps((figure, sample))
                )  # as a bootstrap does
                assert copied.keep is None  # the task stays here
                assert copied(records) == pytest.approx(figure(sample), rel=1e-12)
        return dumped(self)

    monkeypatch.setattr(DispersionTask, "dump_config", gathered)
    world.run(lm, store=tmp_path / "gathered", limit=4)
    same = ["doc_id", "doc_hash", "correct"]
    expected, stored = (
        read_store(tmp_path / name).documents[same] for name in ("plain", "gathered")
    )
    assert stored.equals(expected)


def test_a_task_that_runs_twice_stores_its_latest_run(world, tmp_path):
    import lm_eval

    lm = world.lm()
    loaded = world.manager(dispersion_store=str(tmp_path / "first")).load([ARC])
    lm_eval.evaluate(lm=lm, task_dict=loaded)
    loaded["tasks"][ARC].config.metadata["dispersion_store"] = str(tmp_path / "second")
    results = lm_eval.evaluate(lm=lm, task_dict=loaded, limit=3)
    assert len(read_store(tmp_path / "first").documents) == 8
    assert read_store(tmp_path / "second").documents["doc_id"].tolist() == [0, 1, 2]
    assert results["configs"][ARC]["metadata"]["dispersion"]["documents"] == 3


VALUE, ERROR = AggregatedMetric("dispersion"), AggregatedMetric("dispersion", error=True)


def task_records(*sizes):
    rng = np.random.default_rng(3)
    tasks = []
    for n in sizes:
        rows = rng.normal(0.5, 1, (n, 1, 5)).astype(np.float32)
        states = [DocState({"last": row}, [3], [False], [2.0]) for row in rows]
        tasks.append([DocRecord(state, i, i % 2, "none", {}) for i, state in enumerate(states)])
    return tasks


@pytest.mark.parametrize("sizes", [(2, 9), (1, 1, 4), (0, 3), (1, 1), (5, 5, 5, 2)])
def test_a_groups_figure_is_that_of_all_its_tasks_documents(sizes):
    from lm_eval.api.group import Group
    from lm_eval.api.task import ConfigurableTask

    recording.prepare_lm_eval()
    tasks = task_records(*sizes)
    metrics = [{"metric": name, "weight_by_size": True} for name in ("dispersion", "acc")]
    inner, group = (
        Group.from_config({"group": g, "aggregate_metric_list": metrics}) for g in ("in", "out")
    )
    results = {"other": {"dispersion,none": VALUE(task_records(9)[0])}}
    for i, rows in enumerate(tasks):
        leaf = object.__new__(ConfigurableTask)
        leaf._config = SimpleNamespace(task=f"leaf{i}", _qualified_name=None)
        (inner if i else group).add(leaf)
        results[f"leaf{i}"] = {
            "dispersion,none": VALUE(rows),
            "dispersion_stderr,none": ERROR(rows),
            "acc,none": 0.5,
            "sample_len": len(rows),
        }
    group.add(inner)
    combined = json.loads(json.dumps(group.aggregate(results)))
    expected = dispersion_estimate(matrix(record for task in tasks for record in task))
    assert combined["dispersion,none"] == pytest.approx(expected.mean, rel=1e-12)
    assert combined["dispersion_stderr,none"] == pytest.approx(expected.se, rel=1e-12, nan_ok=True)
    assert combined["acc,none"] == 0.5


def test_only_the_chosen_documents_count_each_once_and_too_few_are_nan():
    (records,) = task_records(6)
    assert type(pickle.loads(pickle.dumps(VALUE(records)))) is float
    right = AggregatedMetric("dispersion_correct")
    expected = dispersion_estimate(matrix(records[1::2])).mean
    assert right(records) == pytest.approx(expected, rel=1e-12)
    assert right([*records, *records[3:]]) == right(records[::-1]) == right(records)
    assert math.isnan(right(records[:2]))
