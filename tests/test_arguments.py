"""A field of a dataclass is a command's option and a function's parameter."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

import pytest

from lmeval_dispersion.arguments import Option, add_options, takes, texts_of
from lmeval_dispersion.options import Once


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Where it is cooked.

    Attributes:
        stove: Kind of the stove, of
            the kitchen's.
        hot_plate: Switch it on.
    """

    stove: Literal["gas", "wood"] | None = None
    hot_plate: bool = False


@dataclass(frozen=True)
class Cooking(Heat):
    """How it is cooked.

    Attributes:
        dish: What is cooked.
        minutes: Time on the fire.
        share: Part of it, such as 5%. Default: 0.5 of it.
        GPUs: As in GPUs.
        spices: One of them; may be repeated.
        lid: Use the lid, or the named one.
    """

    dish: str
    _: KW_ONLY
    minutes: Annotated[int, Option("N", ("-m", "--min"), action=Once)] = 5
    share: Annotated[float | None, Option("X")] = None
    GPUs: Annotated[int | str | None, Option("N")] = None
    spices: Annotated[Sequence[str], Option("NAME", ("--spice",))] = ()
    lid: Annotated[bool | str, Option("NAME")] = False


@takes(Cooking)
def cook(cooking: Cooking) -> str:
    """Cook.

    Slowly.

    Raises:
        ValueError: It is burnt.
    """
    return f"{cooking.dish} {cooking.minutes} {cooking.stove}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_options(made, Heat, dashed=False)
    add_options(made, Cooking, "minutes", "share", "GPUs", "spices", "lid")
    return made


def test_a_function_has_the_fields_as_its_parameters() -> None:
    assert cook("soup") == "soup 5 None"
    assert cook("soup", minutes=7, stove="gas") == "soup 7 gas"
    with pytest.raises(TypeError):
        cook("soup", minute=7)
    signature = str(inspect.signature(cook))
    assert signature.startswith("(dish: 'str', *, stove: ")
    assert "minutes: 'int' = 5" in signature
    assert signature.endswith("-> 'str'") or signature.endswith("-> str")
    text = inspect.getdoc(cook)
    assert text is not None
    before, _, after = text.partition("\n\nArgs:\n")
    assert before == "Cook.\n\nSlowly."
    assert "    minutes: Time on the fire.\n" in after
    assert after.endswith("\n\nRaises:\n    ValueError: It is burnt.")


def test_a_command_has_them_as_options_with_their_types_choices_and_help() -> None:
    made = parser()
    assert vars(made.parse_args([])) == {
        "stove": None, "hot_plate": False, "minutes": 5, "share": None, "GPUs": None, "spices": [], "lid": False,
    }  # fmt: skip
    given = made.parse_args(
        ["--stove", "wood", "--hot_plate", "-m", "7", "--share", ".5", "--GPUs", "2", "--lid"]
    )
    assert (given.stove, given.hot_plate, given.minutes) == ("wood", True, 7)
    assert (given.share, given.GPUs, given.lid) == (0.5, "2", True)
    assert made.parse_args(["--lid", "glass"]).lid == "glass"
    assert made.parse_args(["--spice", "salt", "--spice", "thyme"]).spices == ["salt", "thyme"]
    assert made.parse_args([]).spices == []
    text = " ".join(made.format_help().split())
    for line in (
        "--stove {gas,wood} kind of the stove, of the kitchen's (default: none)",
        "--hot_plate switch it on -m N, --min N time on the fire (default: 5)",
        "part of it, such as 5% (default: 0.5 of it)",
        "--GPUs N as in GPUs (default: none)",
        "--spice NAME one of them; may be repeated (default: none)",
        "--lid [NAME] use the lid, or the named one (default: no)",
    ):
        assert line in text
    for wrong in (["--stove", "coal"], ["-m", "x"], ["-m", "1", "-m", "2"]):
        with pytest.raises(SystemExit):
            made.parse_args(wrong)


def test_every_field_has_a_text() -> None:
    assert list(texts_of(Cooking)) == [
        "stove",
        "hot_plate",
        "dish",
        "minutes",
        "share",
        "GPUs",
        "spices",
        "lid",
    ]
    assert texts_of(Cooking)["stove"] == "Kind of the stove, of the kitchen's."
