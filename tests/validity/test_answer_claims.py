"""The rules of answers.yaml on planted populations: what is there is said, on noise nothing is."""

import numpy as np
import pandas as pd
import pytest

from benchmarks.validity import records
from benchmarks.validity.analysis import FAILS, HOLDS, INCONCLUSIVE, UNTESTED
from benchmarks.validity.answer_claims import ANSWERS, BOTH, ROWS, Kind, claims, decided
from benchmarks.validity.answer_page import COLUMNS, Released
from benchmarks.validity.texts import DOMAINS

QUESTIONS = 400


def population(kind, groups, size, *, skill, seed, answers=0.0, others=0.0, domain_set=None):
    """Lines whose figures are accuracy times a strength, and noise; base at the middle."""
    rng, lines = np.random.default_rng(seed), []
    for group in range(groups):
        for number in range(-1, size):
            line = {"seed": group, "recipe": f"{kind}-{group}-{number:02}", "false": bool(number % 2)}
            true = {domain: float(rng.uniform(0.2, 0.9)) for domain in DOMAINS}
            if number < 0:
                line["recipe"], true = f"base-{group}", dict.fromkeys(DOMAINS, 0.55)
            probability, squares, labels = {}, {}, {}
            for domain, share in true.items():
                right = rng.random(QUESTIONS) < share
                labels[domain] = records.packed(rng.random(QUESTIONS) < share)
                line |= {f"accuracy_{domain}": float(right.mean()), f"seen_{domain}": 1.0}
                for name, column in ROWS.items():
                    strength = (
                        domain_set
                        if domain_set is not None and name in ("G", "ratio")
                        else (answers if "answer" in name or "found" in name else others)
                    )
                    noise = 0 if number < 0 else rng.normal(0, 0.15)
                    line[f"{column}_{domain}"] = strength * share + noise
                spread = rng.normal(0, 0.1, QUESTIONS) if skill else rng.random(QUESTIONS) - share
                probability[domain] = records.packed_shares(np.clip(share + spread, 0, 1))
                squares[domain] = records.packed_shares(np.clip(share + spread[:100], 0, 1))
            line |= {"labels": labels, "probability": {"labels": probability}, "squares": squares}
            lines.append(line)
    return Kind(kind, pd.DataFrame(lines), QUESTIONS)


@pytest.fixture(scope="module")
def planted():
    """Answer tokens tell skill, keywords do not; from scratch both do."""
    tuned = population("tuned", 3, 24, skill=True, seed=0, answers=1.0, domain_set=0.0)
    mixed = population("mix", 2, 24, skill=True, seed=1, answers=1.0, domain_set=0.5)
    return tuned, mixed


def test_what_is_planted_is_said(planted):
    verdicts = {line.claim: line.verdict for line in claims(*planted)}
    assert len(verdicts) == len(claims(*planted)) == 13
    better = [verdict for claim, verdict in verdicts.items() if "orders better" in claim]
    assert better == [HOLDS] * 4
    labels = [verdict for claim, verdict in verdicts.items() if "15 labels" in claim]
    assert labels == [HOLDS] * 4
    assert verdicts["Tokens found by the base serve as well: fine-tunes of six bases, math and code"] in (
        HOLDS,
        INCONCLUSIVE,
    )
    assert decided(*planted) == ANSWERS


def test_on_noise_nothing_is_said():
    tuned, mixed = (population(kind, 3, 20, skill=False, seed=5) for kind in ("tuned", "mix"))
    lines = {line.claim: line.verdict for line in claims(tuned, mixed)}
    assert all(verdict != HOLDS for claim, verdict in lines.items() if "loses nothing" not in claim)
    assert decided(tuned, mixed) == "G"


def test_a_loss_on_mixtures_is_said_and_decides():
    tuned = population("tuned", 3, 24, skill=True, seed=2, answers=1.0, domain_set=0.0)
    mixed = population("mix", 3, 24, skill=True, seed=3, answers=-0.3, domain_set=1.0)
    lost = [line.verdict for line in claims(tuned, mixed) if "loses nothing" in line.claim]
    assert lost == [FAILS, FAILS]
    assert decided(tuned, mixed) in (BOTH, "G")


def test_shares_are_a_slow_count(planted):
    tuned, _ = planted
    table, right, total = tuned.population.table, 0.0, 0
    for i in range(len(table)):
        for j in range(i + 1, len(table)):
            a, b = table.accuracy_code[i], table.accuracy_code[j]
            error = np.sqrt((a * (1 - a) + b * (1 - b)) / QUESTIONS)
            if table.seed[i] == table.seed[j] and abs(a - b) > 2 * error:
                total += 1
                right += (table.ratio_answers_code[i] > table.ratio_answers_code[j]) == (a > b)
    share = tuned.shares[ANSWERS]["code"]
    assert (share.pairs, share.value) == (total, pytest.approx(right / total))
    sides = tuned.sides
    assert sum(part["code"].pairs for part in sides) == total
    split = tuned.false_text
    assert split["G: no false text"]["code"].pairs + split["G: false text"]["code"].pairs == total


def released(*, skill, seed=0, below=True):
    """Fine-tunes of a released base whose answer tokens follow accuracy, or follow nothing."""
    rng, names = np.random.default_rng(seed), sorted({c for of in COLUMNS.values() for c in of.values()})
    rows = [{"kind": "base", "figures": dict.fromkeys(names, 0.5 if below else -9.0), "asked": {}}]
    rows += [{"kind": "adapters", "figures": rows[0]["figures"]}]
    for number in range(24):
        share = {d: float(rng.uniform(0.1, 0.9)) for d in ("math", "code")}
        figures = {name: float(rng.normal(0.5, 0.2)) for name in names}
        for d in share:
            for kind in ("answers", "found"):
                figures[f"ratio_{d}_{kind}"] = share[d] * skill + float(rng.normal(0, 0.02 if skill else 1))
        asked = {}
        for d, p in share.items():
            right, near = rng.random(50) < p, np.clip(p + rng.normal(0, 0.05, 50), 0, 1)
            labels = {"right": records.packed(right), "probability": records.packed_shares(near)}
            asked[d] = {"truth": {"accuracy": p}, "labels": labels | {"squares": records.packed_shares(near)}}
        rows.append({"kind": "full", "name": str(number), "figures": figures, "asked": asked})
    return rows


def test_the_released_base_has_its_claims_judged_on_planted_fine_tunes():
    assert [line.verdict for line in Released(released(skill=1), 120).claims()] == [HOLDS] * 8
    noise = [line.verdict for line in Released(released(skill=0, seed=3), 120).claims()]
    assert noise[:2] == [FAILS, FAILS]
    assert noise[6] == FAILS
    # Where all lie on one side of the base there is no pair to judge.
    above = Released(released(skill=1, below=False), 120).claims()
    assert above[6].verdict == UNTESTED
    moved = released(skill=1)
    moved[1] = moved[1] | {"figures": moved[1]["figures"] | {"ratio_math_answers": 0.6}}
    assert Released(moved, 120).claims()[7].verdict == FAILS
