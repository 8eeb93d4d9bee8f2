"""The command against a mirror that nobody here wrote: olah, serving plain git repositories.

olah answers a ranged request for a file of a local repository with 200 and the whole file, knows no `raw` and
gives no sizes in its listing. A small file is read nevertheless; the rest ends in its named error.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import slow_gap, write_checkpoint
from hub_client import read_of, within
from lmeval_screener.targets.names import Listed
from lmeval_screener.tokens.resolution import resolve_tokens
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from storages import process

TOKENIZER = Path(__file__).parent.parent / "data" / "tokenizers" / "gpt2.json"
V = 50_257


def olah():
    """The program, where this Python's environment has it."""
    beside = Path(sys.executable).with_name("olah-cli")
    return str(beside) if beside.exists() else shutil.which("olah-cli")


pytestmark = [
    pytest.mark.slow,  # test_a_mirror_whose_listing_has_no_sizes is always run
    pytest.mark.skipif(
        olah() is None, reason="pip install olah==0.5.4, which is in the extra `dev`"
    ),
]


def git(folder, *args):
    """Run git with an identity of its own and nobody's settings; what it prints."""
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org", "-c", "gc.auto=0"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *args],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def committed(folder, matrix, *, branch="main", lfs=False):
    """A checkpoint as the head of a branch of a git repository; its commit."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet")
    git(folder, "checkout", "--quiet", "-B", branch)
    write_checkpoint(
        folder, {"lm_head.weight": ("F16", matrix), "model.norm.weight": ("F32", np.ones(4))}
    )
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    if lfs:
        weights = (folder / "model.safetensors").read_bytes()
        oid = hashlib.sha256(weights).hexdigest()
        place = folder / ".git" / "lfs" / "objects" / oid[:2] / oid[2:4] / oid
        place.parent.mkdir(parents=True)
        place.write_bytes(weights)
        (folder / "model.safetensors").write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(weights)}\n"
        )
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "A checkpoint")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    """olah over a folder of git repositories: the folder of org's models, and the address."""
    home = tmp_path_factory.mktemp("olah")
    models = home / "mirrors" / "models" / "org"
    models.mkdir(parents=True)
    (home / "olah.toml").write_text(
        f'[basic]\nrepos-path = "{home / "cache"}"\nmirrors-path = ["{home / "mirrors"}"]\n'
        "[accessibility]\noffline = true\n"
    )
    command = [olah(), "--config", str(home / "olah.toml"), "--log-path", str(home / "logs")]
    command += ["--host", "127.0.0.1", "--port"]
    with process(lambda port: [*command, str(port)], cwd=home) as port:
        yield models, f"http://127.0.0.1:{port}"


def matrix(seed, d):
    draw = np.random.default_rng(seed)
    return (draw.normal(size=(V, d)) + 0.3 * seed).astype("f2")


def test_checkpoints_in_git_are_screened_through_a_mirror_or_have_their_named_error(
    mirror, in_process, tmp_path
):
    models, endpoint = mirror
    rows, commits = {}, {}
    for seed, (name, branch, lfs) in enumerate(
        [("org/plain", None, False), ("org/plain", "step200", False), ("org/lfs", None, True)]
    ):
        rows[name, branch] = matrix(seed, 32)
        place = models / name.partition("/")[2]
        commits[name, branch] = committed(
            place, rows[name, branch], branch=branch or "main", lfs=lfs
        )
    committed(models / "large", matrix(5, 64))
    names = ("org/plain", "org/plain@step*", "org/lfs", "org/large", "org/none", "org/large@step9")
    done = in_process(*names, "--format", "json", endpoint=endpoint)
    assert done.returncode == 3, done.stdout + done.stderr
    result = json.loads(done.stdout)
    vocabulary = Vocabulary.from_file("tokenizer.json", TOKENIZER.read_bytes())
    sets = load_token_set("math", "domain"), load_token_set("reference", "reference")
    ids = resolve_tokens(*sets, vocabulary)
    found = {(c["repo"], c["requested_revision"]): c for c in result["checkpoints"]}
    assert {key: c["revision"] for key, c in found.items()} == commits
    for key, c in found.items():
        expected = slow_gap(rows[key][ids.domain_ids], rows[key][ids.reference_ids])
        assert c["gap"]["cosine"]["mean"] == pytest.approx(expected, abs=1e-9)
    errors = {(f["repo"], f["revision"]): f["error"] for f in result["failed"]}
    assert errors.pop(("org/large", "step9")) in ("RevisionNotFound", "RepoNotFound")
    assert errors == {("org/large", None): "RangeNotSupported", ("org/none", None): "RepoNotFound"}
    # Where a list names files only, olah's resolver says sizes and digests, of LFS's files too.
    for key in (("org/plain", None), ("org/lfs", None)):

        async def listed(client, account, key=key):
            names = ("config.json", "model.safetensors", "tokenizer.json")
            snapshot = await client.snapshot(
                key[0], None, account, Listed(commits[key], names, None, False)
            )
            digest = (await snapshot.look_up("tokenizer.json")).digest
            return (await read_of(snapshot, (0, 7, V - 1))).rows, digest, snapshot.files

        read, digest, files = within(listed, tmp_path / "cache", endpoint=endpoint)
        np.testing.assert_array_equal(read, rows[key][[0, 7, V - 1]])
        place = models / key[0].partition("/")[2]
        assert digest == f"git:{git(place, 'hash-object', 'tokenizer.json')}"
        assert files["model.safetensors"].digest.startswith(
            "sha256:" if key[0] == "org/lfs" else "git:"
        )
