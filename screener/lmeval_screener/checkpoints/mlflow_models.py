"""Models in an MLflow registry (extra ``mlflow``): versions are resolved to their storage and read there.

MLflow's own client asks the registry, with its settings and credentials (``MLFLOW_TRACKING_URI``,
``MLFLOW_TRACKING_TOKEN``, …). A version's storage is read by ranges, or refused if it does not support them.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from yarl import URL

from lmeval_dispersion.errors import first_line
from lmeval_screener.checkpoints.account import Account
from lmeval_screener.checkpoints.concurrency import in_thread
from lmeval_screener.checkpoints.http import SILENCE, environment_proxy, natural
from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets.names import MODEL, Target, parse_target

T = TypeVar("T")

_SERVER = (
    "check that MLFLOW_TRACKING_URI (or MLFLOW_REGISTRY_URI) is the address of your MLflow server"
)


class RegisteredModels:
    """Models in an MLflow registry, addressed as ``models:/NAME``; a `Source`.

    Args:
        open_storage: Opens a checkpoint, given a target with the address where MLflow stores a
            version, and the account.
    """

    def __init__(self, open_storage: Callable[[Target, Account], Awaitable[Snapshot]]) -> None:
        self._open_storage = open_storage
        self._client: Any = None

    async def expand(self, target: Target, account: Account) -> list[Target]:
        """Return a target with a version number for each version that an address names.

        ``models:/NAME`` and ``models:/NAME/STAGE`` name the latest version, ``models:/NAME@ALIAS``
        the one with that alias, and ``models:/NAME/*`` all versions, in order. Except by alias,
        only versions that are ready are taken. An address with a number is returned unchanged.

        Raises:
            ScreeningError: The registry has no such version, or cannot be asked.
        """
        name, version, alias = _name_version_alias(target.repo)
        if version and version.isdigit():
            return [target]
        if alias:
            named = await self._asked(
                target, lambda client: client.get_model_version_by_alias(name, alias)
            )
            return [replace(target, repo=f"models:/{name}/{named.version}")]
        quote = '"' if "'" in name else "'"
        every = await self._asked(
            target, lambda client: list(client.search_model_versions(f"name={quote}{name}{quote}"))
        )
        stated = [natural(str(entry.version)) for entry in every if _is_wanted(entry, version)]
        numbers = sorted(number for number in stated if number is not None)
        if not numbers:
            problem = f"no version of the model {name}; check the name, and {_SERVER}"
            if every:
                stage = f"in the stage {version} and " if version and version != "*" else ""
                problem = (
                    f"no version of the model {name} that is {stage}ready ({len(every)} in all); "
                    f"name a version by its number, such as models:/{name}/{every[0].version}"
                )
            raise ScreeningError("RepoNotFound", f"the MLflow registry has {problem}")
        wanted = numbers if version == "*" else numbers[-1:]
        return [replace(target, repo=f"models:/{name}/{number}") for number in wanted]

    async def snapshot(self, target: Target, account: Account) -> Snapshot:
        """Open a version of a model where MLflow stores it; see `Source.snapshot`."""
        chosen = (await self.expand(target, account))[-1]
        name, version, _ = _name_version_alias(chosen.repo)
        where = await self._asked(
            chosen, lambda client: str(client.get_model_version_download_uri(name, str(version)))
        )
        download = f"download the version (mlflow artifacts download -u {chosen.repo}) and screen the folder"
        if where.startswith("mlflow-artifacts:"):
            raise ScreeningError(
                "RangeNotSupported",
                "screening reads only parts of files, but the MLflow server sends the files of "
                f"{chosen.repo} only as a whole; start that server as `mlflow server "
                f"--no-serve-artifacts --default-artifact-root s3://…` (or gs://), or {download}",
            )
        inner = replace(
            parse_target(where), tokenizer=chosen.tokenizer, file=chosen.file, by_file=True
        )
        if inner.refused is not None or inner.on_hub or inner.scheme == "models":
            raise ScreeningError(
                "BadName",
                f"the files of {chosen.repo} are at {where}, an address that cannot be read; {download}",
            )
        try:
            # MLflow's flavour for transformers keeps model and tokenizer in separate folders.
            place = inner.address.rstrip("/")
            tokenizer = inner.tokenizer or f"{place}/components/tokenizer"
            model = replace(inner.at(f"{place}/model"), tokenizer=tokenizer)
            snapshot = await self._open_storage(model, account)
        except ScreeningError as error:
            if error.code not in ("FolderNotFound", "FileNotFound"):
                raise
            snapshot = await self._open_storage(inner, account)
        snapshot.repo = chosen.repo
        return snapshot

    async def _asked(self, target: Target, question: Callable[[Any], T]) -> T:
        """The registry's answer; its client blocks, so it runs in a thread."""

        def ask() -> T:
            if self._client is None:
                self._client = _client()
            return question(self._client)

        try:
            return await in_thread(ask)
        except ScreeningError:
            raise
        except Exception as error:
            raise _explained(error, target.repo) from error


def _client() -> Any:
    """MLflow's client; the server is tried first, since the client retries for minutes."""
    try:
        from mlflow import MlflowClient, get_registry_uri
    except ImportError:
        raise ScreeningError(
            "MissingExtra",
            "addresses with models:/ need the package mlflow-skinny; run: pip install "
            "'lmeval-dispersion[mlflow]'",
        ) from None
    server = URL(get_registry_uri())
    if server.scheme in ("http", "https") and environment_proxy(server) is None:
        try:
            socket.create_connection((server.host, server.port), timeout=SILENCE).close()
        except OSError as error:
            raise ScreeningError(
                "Unreachable",
                f"the MLflow server {server.origin()} cannot be reached ({error}); start it, or {_SERVER}",
            ) from error
    return MlflowClient()


def _explained(error: Exception, what: str) -> ScreeningError:
    code = str(getattr(error, "error_code", ""))
    reason = first_line(error)[:200]
    if code in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND", "INVALID_PARAMETER_VALUE"):
        return ScreeningError(
            "RepoNotFound",
            f"the MLflow registry has no {what} ({reason}); check the name, and {_SERVER}",
        )
    if code in ("PERMISSION_DENIED", "UNAUTHENTICATED") or re.search(r"\b40[13]\b", reason):
        return ScreeningError(
            "AccessDenied",
            f"the MLflow registry refuses access to {what} ({reason}); set MLFLOW_TRACKING_TOKEN, or "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        )
    return ScreeningError(
        "ServerError",
        f"the MLflow registry answered with an error for {what} ({reason}); try again, and "
        f"{_SERVER}",
    )


def _name_version_alias(address: str) -> tuple[str, str | None, str | None]:
    """Name, version or stage, and alias of ``models:/NAME[/VERSION|@ALIAS]``."""
    parts = MODEL.fullmatch(address)
    assert parts is not None, "parse_name accepts no other text"
    return parts[1], parts[2], parts[3]


def _is_wanted(version: Any, wanted: str | None) -> bool:
    if str(version.status) not in ("READY", "None"):
        return False
    if wanted is None or wanted == "*" or wanted.lower() == "latest":
        return True
    return str(version.current_stage).lower() == wanted.lower()
