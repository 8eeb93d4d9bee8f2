"""Servers and files that would send the program elsewhere, or never let it go."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hub_client import refused, within
from hypothesis import given
from hypothesis import strategies as st
from lmeval_screener import screen
from lmeval_screener.checkpoints.account import Account
from lmeval_screener.checkpoints.http import Quota, natural, retry_after
from lmeval_screener.checkpoints.hub import parse_listing, parse_references
from lmeval_screener.checkpoints.networks import Networks
from lmeval_screener.checkpoints.source import Sources
from lmeval_screener.errors import ScreeningError
from lmeval_screener.screening.selection import Query, Selected, _listed, _parse_page
from lmeval_screener.targets.names import parse_target
from lmeval_screener.targets.runs import step_key, step_number

from lmeval_dispersion.installation import data_folder

# --- private networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("169.254.169.254", "link-local"),
        ("[fe80::1%25eth0]", "link-local"),
        ("::ffff:169.254.169.254", "link-local"),
        ("64:ff9b::a9fe:a9fe", "link-local"),
        ("100.100.100.200", "private"),
        ("100.64.0.1", "private"),
        ("fd00:ec2::254", "private"),
        ("10.1.2.3", "private"),
        ("0.0.0.0", "private"),
        ("::", "private"),
        ("localhost", "private"),
        ("a.localhost", "private"),
        ("LOCALHOST.", "private"),
        ("2130706433", "private"),  # 127.0.0.1 as one number, which resolvers take
        ("0x7f.1", "private"),
        ("8.8.8.8", ""),
        ("198.18.0.1", ""),  # proxies give every host one of these
        ("2001:4860:4860::8888", ""),
    ],
)
def test_what_a_host_reaches(host, network):
    assert asyncio.run(Networks("https://hub.example").private(host)) == network


@pytest.mark.parametrize("variable", ["HF_ENDPOINT", "AWS_ENDPOINT_URL", "MLFLOW_TRACKING_URI"])
def test_a_host_that_the_user_names_may_be_anywhere(monkeypatch, variable):
    monkeypatch.setenv(variable, "http://me:word@10.1.2.3:9000/x")
    networks = Networks()
    assert asyncio.run(networks.private("10.1.2.3")) == ""
    assert asyncio.run(networks.private("10.1.2.4")) == "private"
    networks.name("https://10.1.2.5/m")
    assert asyncio.run(networks.private("10.1.2.5")) == ""


def test_a_server_on_this_machine_may_lead_to_another_here():
    networks = Networks("http://127.0.0.1:8000")
    assert asyncio.run(networks.private("localhost")) == ""
    assert asyncio.run(networks.private("10.1.2.3")) == "private"


def test_a_name_that_changes_its_address_is_not_connected_to():
    networks = Networks("https://hub.example")
    assert asyncio.run(networks.private("8.8.8.8")) == ""
    networks.check_resolved("8.8.8.8", ["8.8.8.8"])
    networks.check_resolved("never.asked", ["10.0.0.1"])
    with pytest.raises(OSError, match="private network"):
        networks.check_resolved("8.8.8.8", ["10.0.0.1"])


@pytest.mark.parametrize(
    "base", ["http://169.254.169.254/m", "http://10.1.2.3/m", "sftp://me:word@10.1.2.3/m"]
)
def test_an_adapter_may_not_name_a_base_in_a_private_network(tmp_path, base):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": base, "r": 2, "lora_alpha": 4})
    )
    shutil.copy(
        data_folder("demo") / "sums-20" / "model-00001-of-00002.safetensors", tmp_path / "x"
    )
    (tmp_path / "x").rename(tmp_path / "adapter_model.safetensors")
    (failed,) = screen([str(tmp_path)]).failed
    assert failed.error == "BadName"
    assert "network" in failed.message
    assert "word" not in failed.message


def test_a_base_that_the_user_names_too_is_asked(tmp_path):
    target = parse_target("http://10.1.2.3/m")

    async def asked(hub: Any, account: Account) -> str:
        sources = Sources(hub)
        await sources.expand(target, account)
        return await hub.networks.private("10.1.2.3")

    assert within(asked, tmp_path, offline=True) == ""


# --- numbers and names of servers ------------------------------------------------------------------------


@pytest.mark.parametrize("r", ["1", "9" * 20, "9" * 5000, "²", "١"])
@pytest.mark.parametrize("t", ["1", "9" * 400, "9" * 5000, "-1"])
def test_a_quota_without_end_is_no_error(r, t):
    quota = Quota("api")
    quota._in_flight = 1
    quota.release({"RateLimit": f'"api";r={r};t={t}'})
    assert retry_after({"RateLimit": f'"api";r={r};t={t}'}) in (None, 1.5)
    assert quota.available() != 0


@pytest.mark.parametrize(
    "value",
    [
        "9" * 5000,
        "Mon, 01 Jan 0001 00:00:00 -0000",
        "Mon, 99 Jan 2026",
        "1e400",
        "Fri, 31 Dec 9999 23:59:59 -2359",
    ],
)
def test_a_wait_that_no_clock_knows_is_no_error(value):
    wait = retry_after({"Retry-After": value})
    assert wait is None or wait >= 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12),
        ("²", None),
        ("9" * 5000, None),
        ("", None),
        ("-1", None),
        ("*", None),
        ("١", None),
    ],
)
def test_a_size_is_a_number(text, number):
    assert natural(text) == number


SHA = "0" * 40


@pytest.mark.parametrize(
    "name", ["org/a\x00b", "org/\ud800", "org/a b", "../x", "a/b/c", "\x1b[31m", 5, ["a"]]
)
def test_names_that_no_repository_has(name):
    with pytest.raises((ValueError, TypeError)):
        _parse_page([{"id": name}])
    with pytest.raises((ValueError, TypeError)):
        parse_listing({"id": name, "sha": SHA, "siblings": []})


@pytest.mark.parametrize("name", ["a\x00b", "a\nb", "\ud800", "x" * 5000, "", 5])
def test_names_that_no_file_or_branch_has(name):
    with pytest.raises((ValueError, TypeError)):
        parse_listing({"sha": SHA, "siblings": [{"rfilename": name}]})
    with pytest.raises((ValueError, TypeError)):
        parse_references({"branches": [{"name": name}]})


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=2), st.integers(0, 3))
def test_steps_are_ordered_by_their_numbers(numbers, zeros):
    first, second = (f"step{'0' * zeros}{number}-x" for number in numbers)
    assert (step_key(first) < step_key(second)) == (numbers[0] < numbers[1])


def test_a_branch_of_thousands_of_digits_has_a_place():
    long = f"step{'9' * 5000}"
    assert sorted([long, "step10", "step9", "main"], key=step_key) == [
        "main",
        "step9",
        "step10",
        long,
    ]
    assert step_number(long) is None


# --- listings without end --------------------------------------------------------------------------------


class _Endless:
    """A Hub whose listing always has another page."""

    def __init__(self, addresses: Any) -> None:
        self.account, self._addresses, self.asked = Account(), addresses, 0

    async def page(self, address: str, *_: Any) -> tuple[list[Any], str | None]:
        self.asked += 1
        return [(f"org/m{self.asked}", "", None)], next(self._addresses)


@pytest.mark.parametrize(
    ("addresses", "most", "says"),
    [
        ((f"/p{n}" for n in range(10**6)), 512, "pages"),
        (iter(["/a", "/b"] * 10**4), 3, "repeats a page"),
    ],
)
def test_a_listing_without_end_ends(addresses, most, says):
    hub = _Endless(addresses)
    error = refused(
        asyncio.run,
        _listed(hub, Query("org"), None, None, Selected()),
        code="BadResponse",
        says=says,
    )
    assert isinstance(error, ScreeningError)
    assert hub.asked == most


# --- endpoints -------------------------------------------------------------------------------------------


def test_rows_of_another_endpoint_have_keys_of_their_own(monkeypatch, tmp_path: Path):
    from lmeval_screener.checkpoints.hub import Hub, HubSnapshot

    listing = parse_listing(
        {
            "id": "org/m",
            "sha": SHA,
            "siblings": [{"rfilename": "m.safetensors", "lfs": {"sha256": "1" * 64}}],
        }
    )
    keys = []
    for endpoint in (
        "https://huggingface.co",
        "https://mirror.example",
        "https://me:word@mirror.example",
    ):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        keys.append(HubSnapshot(Hub(offline=True), listing, Account()).content_key("m.safetensors"))
    digest = f"sha256:{'1' * 64}"
    assert keys == [digest, f"https://mirror.example {digest}", f"https://mirror.example {digest}"]
