"""Commands in forks of one process that has imported all: killed at a planned moment, or short of disk.

`Forks` starts ``python tests/forks.py MODULE…``, which reads one job a line and answers with one line.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: What a race of models imports.
OF_A_RACE = (
    "datasets",
    "lm_eval.evaluator",
    "lm_eval.models.huggingface",
    "lm_eval.tasks.manager",
    "transformers.models.llama",
    "lmeval_dispersion.racing.commands",
    "lmeval_dispersion.racing.evaluation",
)
#: What Python tells of a change of files (``open`` only of a file that is written).
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, or minus the signal; its text; its changes of files and CPU."""

    code: int
    out: str
    err: str
    changes: int
    cpu: float


class Forks:
    """Runs ``dispersion`` in forks: ``run(words, …)``; a context that ends the process."""

    def __init__(self, *modules: str, cwd: Path, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=dict(env),
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(
        self,
        *words: object,
        at_change: int | None = None,
        at_append: int | None = None,
        at_cpu: float | None = None,
        most_bytes: int | None = None,
        is_bound: bool = False,
        main: str = "lmeval_dispersion.cli",
    ) -> Ended:
        """Run a command to its end.

        Args:
            words: Its words.
            at_change: The number of the change of files before which it is killed.
            at_append: The number of the file, of those opened for appending, before whose bytes are
                safe on disk (``os.fsync``) it is killed.
            at_cpu: Seconds of CPU after which it is killed.
            most_bytes: The largest file that it may write, as on a full disk.
            is_bound: Whether permissions of files hold for it, also if this is root.
            main: The module of its ``main``.
        """
        job = {
            "words": [str(word) for word in words],
            "at_change": at_change,
            "at_append": at_append,
            "at_cpu": at_cpu,
            "most_bytes": most_bytes,
            "is_bound": is_bound,
            "main": main,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


def _count_changes(at: int | None, counted: int) -> None:
    """Count the changes of files into a pipe; die before number ``at``."""
    left = at

    def hook(event: str, given: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in CHANGES:
            return
        if event == "open" and not (
            isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            return
        os.write(counted, b".")
        if left is not None:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _die_at_append(at: int) -> None:
    """Die at the ``fsync`` of number ``at`` of the files that are open for appending."""
    left = at
    fsync = os.fsync

    def dying(number: int) -> None:
        nonlocal left
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_APPEND:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        fsync(number)

    os.fsync = dying  # type: ignore[assignment]


def _give_up_rights() -> None:
    """Have permissions of files hold for root too: a process without capabilities."""
    header = struct.pack("=Ii", 0x20080522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capset")


def _child(job: Mapping[str, Any], out: int, err: int, counted: int) -> None:
    """Run the job's command, and end this process with its code."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", encoding="utf-8")
    code = 70
    try:
        main = importlib.import_module(job["main"]).main
        if job["is_bound"]:
            _give_up_rights()
        _count_changes(job["at_change"], counted)
        if job["at_append"] is not None:
            _die_at_append(job["at_append"])
        if job["most_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["most_bytes"], resource.RLIM_INFINITY))
        if job["at_cpu"] is not None:
            # Without a handler SIGPROF ends the process at once, as SIGKILL does.
            signal.setitimer(signal.ITIMER_PROF, job["at_cpu"])
        code = main(job["words"])
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forked(job: Mapping[str, Any]) -> Ended:
    """Run a job in a fork. Its text comes through pipes, which a full disk does not reach."""
    texts = {}
    pipes = [os.pipe(), os.pipe(), os.pipe()]
    number = os.fork()
    if number == 0:
        _child(job, *(write for _, write in pipes))

    def read(at: int) -> None:
        with os.fdopen(pipes[at][0], "rb") as stream:
            texts[at] = stream.read().decode("utf-8", "replace")

    readers = [threading.Thread(target=read, args=(at,)) for at in range(3)]
    for (_, write), reader in zip(pipes, readers, strict=True):
        os.close(write)
        reader.start()
    _, status, usage = os.wait4(number, 0)
    for reader in readers:
        reader.join()
    cpu = usage.ru_utime + usage.ru_stime
    return Ended(os.waitstatus_to_exitcode(status), texts[0], texts[1], len(texts[2]), cpu)


def _serve(modules: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in modules:
        importlib.import_module(name)
    if "lm_eval.tasks.manager" in sys.modules:  # without its 10,000 tasks
        sys.modules["lm_eval.tasks.manager"].__file__ = "/none/manager.py"
    if "lm_eval.evaluator" in sys.modules:  # without a description of this machine
        sys.modules["lm_eval.evaluator"].add_env_info = lambda results: None  # type: ignore[attr-defined]
    for line in sys.stdin:
        answers.write(json.dumps(vars(_forked(json.loads(line)))) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1:])
