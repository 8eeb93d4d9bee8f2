"""Folders of ten thousand: listed a few at a time, each in its own time; and names that no terminal bears."""

from __future__ import annotations

import asyncio
import shutil

from lmeval_screener.checkpoints import FileEntry, stores
from lmeval_screener.checkpoints.stores import FolderListing, Store, StoreSource
from lmeval_screener.cli import main
from lmeval_screener.targets import Target
from storages import within

from lmeval_dispersion.cli import main as dispersion
from lmeval_dispersion.paths import data_folder

FOLDERS = tuple(f"m{number:04d}" for number in range(1000))


class Zoo(Store):
    """A thousand checkpoints in one folder; counts the listings that are on their way."""

    running, most, asked = 0, 0, []

    async def listed(self, path, meter):
        Zoo.asked.append(path)
        Zoo.running += 1
        Zoo.most = max(Zoo.most, Zoo.running)
        await asyncio.sleep(0.02)
        Zoo.running -= 1
        if path == "zoo":
            return FolderListing(FOLDERS)
        names = ("config.json", "model.safetensors")
        return FolderListing((), {name: FileEntry(name, 10, "etag:1") for name in names})


def test_a_thousand_folders_are_never_asked_for_at_once_and_each_has_its_own_time(tmp_path, monkeypatch):
    monkeypatch.setattr(Zoo, "asked", [])

    async def work(hub, budget):
        targets = await StoreSource(Zoo, hub).expand(Target("zoo://box/zoo/*"), budget)
        return [target.repo for target in targets]

    # 32 at a time take 32 rounds of 20 ms, more than the 0.3 s that each of them may take.
    assert within(tmp_path, work, timeout=0.3) == [f"zoo://box/zoo/{name}" for name in FOLDERS]
    assert Zoo.most <= stores.LISTINGS < len(FOLDERS)
    assert sorted(Zoo.asked) == ["zoo", *(f"zoo/{name}" for name in FOLDERS)], "each of them once"


def test_control_characters_in_names_reach_no_terminal(tmp_path, capsys, monkeypatch):
    """Of folders that are screened, of those that fail, and in every form."""
    for name, step in (("a\x1b[31mb", "sums-10"), ("c\x1b]0;title\x07d", "sums-80")):
        shutil.copytree(data_folder("demo") / step, tmp_path / name)
    (tmp_path / "e\x1b[31mbad").mkdir()
    (tmp_path / "e\x1b[31mbad" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    for form in ("table", "csv", "json", "markdown"):
        main(["./*", "--domain", "math", "--format", form])
        out = "".join(capsys.readouterr())
        assert "\\x1b[31m" in out
        assert not {"\x1b", "\x07"} & set(out)
    assert main(["--from", "none\x1b[31m"]) == dispersion(["audit", "./none\x1b[31m"]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert "none\\x1b[31m" in line
        assert "\x1b" not in line
