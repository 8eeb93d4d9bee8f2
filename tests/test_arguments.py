"""A field of a dataclass is a command's option and a function's parameter."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import pytest

from lmeval_dispersion.arguments import Option, add_options, given_of, options_from, takes, texts_of
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import Once

if TYPE_CHECKING:
    from pathlib import PurePath


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
    minutes: Annotated[int, Option("N", ("-m", "--min"), action=Once, least=1)] = 5
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
    with pytest.raises(TypeError, match=r"cook\(\) .*'minute'; did you mean minutes"):
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


Way = Literal["boiled", "fried"]


@dataclass(frozen=True)
class Serving:
    """How it is served.

    Attributes:
        course: Which course it is.
        dishes: What is served; see below.

            Or a dish that is ready.
        guests: Who eats it.
        way: How each dish is made; may be repeated.
        hours: Hours at which it is served.
        table: Where it is served.
    """

    course: Literal["first", "last"] = "first"
    dishes: Annotated[str | Iterable[str] | PurePath, Option("DISH")] = ()
    guests: Annotated[str | None, Option("NAME")] = None
    _: KW_ONLY
    way: Sequence[Way] | Way | None = None
    hours: Annotated[Sequence[int], Option("N,N")] = (12, 19)
    table: Annotated[str, Option("PLACE", ("-t", "--table"))]


def served(*words: str, **more: object) -> argparse.Namespace:
    made = argparse.ArgumentParser()
    add_options(made, Serving, "dishes", "way", "hours", "table", **more)
    return made.parse_args(words)


def test_what_python_takes_by_position_is_a_positional_argument() -> None:
    given = served("soup", "fish", "-t", "garden")
    assert vars(given) == {
        "dishes": ["soup", "fish"],
        "way": [],
        "hours": (12, 19),
        "table": "garden",
    }
    assert served("-t", "garden").dishes == ()
    assert given_of(Serving, given) == vars(given)
    assert options_from(Serving, given) == Serving("first", **vars(given))
    with pytest.raises(SystemExit):  # without a default an option is required
        served("soup")
    made = argparse.ArgumentParser()
    add_options(made, Cooking, "dish")
    add_options(made, Serving, "guests")
    assert vars(made.parse_args(["soup"])) == {"dish": "soup", "guests": None}
    assert vars(made.parse_args(["soup", "Ann"])) == {"dish": "soup", "guests": "Ann"}
    with pytest.raises(SystemExit):
        made.parse_args([])


def test_the_positional_arguments_have_their_help_in_the_order_wanted() -> None:
    made = argparse.ArgumentParser(prog="serve")
    add_options(made, Serving, "guests", "course", "dishes")
    text = made.format_help()
    assert "[NAME] {first,last} [DISH ...]" in text
    assert "  NAME          who eats it\n" in text
    assert "  {first,last}  which course it is (default: first)\n" in text
    assert "  DISH          what is served; see below\n" in text


def test_values_of_a_sequence_are_of_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    given = served("-t", "x", "--way", "fried", "--way", "boiled", "--hours", "8,20")
    assert given.way == ["fried", "boiled"]
    assert given.hours == (8, 20)
    for words, message in (
        (["--way", "raw"], "argument --way: invalid choice: 'raw' (choose from"),
        (
            ["--hours", "8,x"],
            "argument --hours: expected whole numbers separated by commas, such as",
        ),
    ):
        with pytest.raises(SystemExit):
            served("-t", "x", *words)
        assert message in capsys.readouterr().err
    assert "way: 'Sequence[Way] | Way | None' = None" in str(inspect.signature(serve))


@takes(Serving)
def serve(serving: Serving) -> str:
    """Serve."""
    return f"{serving.course} {serving.way}"


def test_python_refuses_what_the_command_refuses() -> None:
    assert serve("last", way=["fried"], table="x") == "last ['fried']"
    assert serve(way="boiled", table="x") == "first boiled"
    assert serve(way=None, table="x") == "first None"
    for given in ({"way": "raw"}, {"way": ("fried", "raw")}):
        with pytest.raises(UsageError, match="expected boiled or fried, got 'raw'") as raised:
            serve(table="x", **given)
        assert raised.value.argument == "way"
    for course in ("middle", None):
        with pytest.raises(UsageError, match=f"course: expected first or last, got {course!r}"):
            serve(course, table="x")


def test_a_number_below_the_least_one_is_refused_in_python_and_by_the_command() -> None:
    for wrong in (
        lambda: cook("soup", minutes=0),
        lambda: options_from(Cooking, argparse.Namespace(dish="soup", minutes=0)),
    ):
        with pytest.raises(UsageError, match="minutes: expected at least 1, got 0"):
            wrong()
    with pytest.raises(UsageError, match="minutes: expected at least 1, got nan"):
        cook("soup", minutes=float("nan"))
    for wrong_type in ("3", None):
        with pytest.raises(UsageError, match=f"minutes: expected a number, got {wrong_type!r}"):
            cook("soup", minutes=wrong_type)


def test_what_a_caller_adds_stands_in_place_of_the_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = argparse.ArgumentParser()
    add_options(made, Serving, "way", "hours", default=None, help="At will. Default: a.-1,b.")
    assert vars(made.parse_args([])) == {"way": None, "hours": None}
    assert "at will (default: a.-1,b)\n" in made.format_help()
    made = argparse.ArgumentParser()
    add_options(made, Serving, "table", required=False, default=None)
    assert made.parse_args([]).table is None
    assert "where it is served (default: none)" in made.format_help()
    made = argparse.ArgumentParser()
    add_options(made, Serving, "way", nargs="+", action="extend")
    assert made.parse_args(["--way", "fried", "boiled", "--way", "fried"]).way == [
        "fried",
        "boiled",
        "fried",
    ]
    with pytest.raises(SystemExit):
        made.parse_args(["--way", "fried", "raw"])
    assert "invalid choice: 'raw'" in capsys.readouterr().err
    made = argparse.ArgumentParser()
    add_options(made, Serving, "hours")
    assert "hours at which it is served (default: 12,19)" in made.format_help()
