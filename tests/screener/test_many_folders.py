"""Folders of ten thousand: listed a few at a time, each in its own time; and names that no terminal bears."""

from __future__ import annotations

import asyncio
import shutil

from lmeval_screener import screen
from lmeval_screener.checkpoints import FileEntry, stores
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.checkpoints.stores import FolderListing, Store, StoreSource
from lmeval_screener.cli import main
from lmeval_screener.targets import Target

from lmeval_dispersion.cli import main as dispersion
from lmeval_dispersion.paths import data_folder

FOLDERS = tuple(f"m{number:04d}" for number in range(1000))


class Zoo(Store):
    """A thousand checkpoints in one folder; counts the listings that are on their way."""

    latency, running, most, asked = 0.02, 0, 0, []

    async def listed(self, path, meter):
        kind = type(self)
        kind.asked.append(path)
        kind.running += 1
        kind.most = max(kind.most, kind.running)
        await asyncio.sleep(kind.latency)
        kind.running -= 1
        if path == "zoo":
            return FolderListing(FOLDERS)
        names = ("config.json", "model.safetensors")
        return FolderListing((), {name: FileEntry(name, 10, "etag:1") for name in names})


def expanded(seconds, cache):
    """The names that a glob stands for, where a checkpoint may take so many seconds."""

    async def work():
        async with Hub(cache=cache, offline=False, endpoint="http://127.0.0.1:9") as hub:
            budget = Budget(seconds)
            search = StoreSource(Zoo, hub).expand(Target("zoo://box/zoo/*"), budget)
            return [target.repo for target in await budget.bounded(search)]

    return asyncio.run(work())


def test_a_thousand_folders_are_never_asked_for_at_once_and_each_has_its_own_time(tmp_path, monkeypatch):
    monkeypatch.setattr(Zoo, "asked", [])
    # 32 at a time take 32 rounds of 20 ms, more than the 0.3 s that each of them may take.
    assert expanded(0.3, tmp_path) == [f"zoo://box/zoo/{name}" for name in FOLDERS]
    assert Zoo.most <= stores.LISTINGS < len(FOLDERS)
    assert sorted(Zoo.asked) == ["zoo", *(f"zoo/{name}" for name in FOLDERS)], "each of them once"


def test_control_characters_in_names_reach_no_terminal(tmp_path, capsys, monkeypatch):
    """Of folders that are screened, of those that fail, and in every form."""
    demo = data_folder("demo")
    for name, step in (("a\x1b[31mb", "sums-10"), ("c\x1b]0;title\x07d", "sums-80")):
        shutil.copytree(demo / step, tmp_path / name)
    names = ["a\\x1b[31mb", "c\\x1b]0;title\\x07d"]
    assert sorted(c.label for c in screen([str(p) for p in tmp_path.iterdir()]).checkpoints) == names
    (tmp_path / "e\x1b[31mbad").mkdir()
    (tmp_path / "e\x1b[31mbad" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    for form in ("table", "csv", "json", "markdown"):
        main(["./*", "--domain", "math", "--format", form])
        out = "".join(capsys.readouterr())
        assert "\\x1b[31m" in out
        assert "\x1b[31m" not in out
        assert "\x07" not in out
    assert main(["--from", "none\x1b[31m"]) == dispersion(["audit", "./none\x1b[31m"]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert "none\\x1b[31m" in line
        assert "\x1b" not in line
