"""The published JSON Schemas: well-formed, named for their contracts, and as strict as a contract is."""

import json
import re

import pytest
import schemas
from json_schemas import FOLDER, changed, faults
from lmeval_screener.cli import main

from lmeval_dispersion.installation import data_folder

DEMO = data_folder("demo")
SITE = "https://lmeval-dispersion.github.io/lmeval-dispersion/reference/schemas/"


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Outputs of the command with every part that it can have, and the manifest of a short list."""
    folder = tmp_path_factory.mktemp("outputs")
    some = [str(DEMO / name) for name in ("sums-80", "sums-45", "sums-00")]
    runs = {
        "demo": ["--demo"],
        "gate": [*some, str(folder / "none"), "--fail-if-below", some[0]],
        "list": [*some, "--shortlist", "1", "--audit-sample", "1", "--emit", str(folder / "list")],
    }
    for name, arguments in runs.items():
        main([*arguments, "--quiet", "--output", str(folder / f"{name}.json")])
    files = [*(folder / f"{name}.json" for name in runs), folder / "list" / "manifest.json"]
    return [json.loads(file.read_text("utf-8")) for file in files]


def test_every_schema_has_the_address_at_which_it_is_published():
    files = sorted(FOLDER.glob("*.json"))
    assert len(files) >= 12
    for file in files:
        schema = json.loads(file.read_text("utf-8"))
        contract = schema["properties"].get("schema") or schema["properties"]["format"]
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert schema["$id"] == SITE + file.name
        assert file.stem == contract["const"].replace("/", "-") == schema["title"].replace("/", "-")


def test_what_the_screener_writes_is_valid(printed):
    assert [faults(document) for document in printed] == [[]] * 4
    demo, gate, listed, manifest = printed
    assert "agreement" in demo
    assert gate["failed"]
    assert "gate" in gate
    assert "shortlist" in listed
    assert manifest["schema"] == "screen-checkpoints-shortlist/2"


def test_a_renamed_or_missing_key_of_the_screener_fails(printed):
    free = ("pieces.",)  # named by the tokenizer
    optional = {
        "answer",
        "equal_rows",
        "agreement",
        "gate",
        "shortlist",
        "chosen",
        "inclusion_probability",
    }
    optional |= {"tokenizer"}
    several = ("checkpoints", "candidates")
    names = {"schema", "format"}  # the schema is found by it
    for document in (printed[0], printed[1], printed[3]):
        # One checkpoint is as good as eleven, and each of hundreds of copies is validated.
        document = {**document, **{key: document[key][:1] for key in several if key in document}}
        for change in ("renamed", "missing"):
            for one, where in changed(document, change):
                key = where.rpartition(".")[2]
                if any(part in where for part in free):
                    continue
                if (change == "missing" and key in optional) or where.lstrip("$.") in names:
                    continue
                assert faults(one), f"{where} {change}"


def test_every_contract_of_a_report_is_published_and_in_the_change_log():
    """`RESULTS` or `LAYOUTS` of scripts/schemas.py has it; a registry's rows follow the question."""
    log = (FOLDER.parents[2] / "CHANGELOG.md").read_text("utf-8")
    pattern = re.compile(r'^    schema(?:: ClassVar\[str\])? = "(\S+/\d+)"$', re.MULTILINE)
    for room in ("lmeval_dispersion", "screener/lmeval_screener"):
        for path in (FOLDER.parents[2] / room).rglob("*.py"):
            for contract in pattern.findall(path.read_text("utf-8")):
                assert f"`{contract}`" in log, contract
                if contract != "dispersion-registry/1":
                    assert (FOLDER / f"{contract.replace('/', '-')}.json").is_file(), contract


def test_schemas_are_those_of_the_classes(capsys):
    assert schemas.main(["--check"]) == 0, capsys.readouterr().err
