"""S3, Google Cloud Storage and Azure: listed and read by ranges through obstore (extra ``cloud``).

obstore's own retries are switched off: each attempt is one request that the account counts. Every
range asks for the listed version (``If-Match``, which obstore's ``get_ranges`` does not offer) and is
accepted only if begin, end, total and ETag are as expected. An object that is replaced while it is
read is an error.
"""

from __future__ import annotations

import asyncio
import os
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import first_line
from lmeval_screener.checkpoints.account import Account, RetryError, contradiction
from lmeval_screener.checkpoints.concurrency import in_thread
from lmeval_screener.checkpoints.http import (
    AGENT,
    CONNECTIONS,
    SILENCE,
    untrusted,
)
from lmeval_screener.checkpoints.snapshot import SERVICES, FileEntry, changed, version_digest
from lmeval_screener.checkpoints.stores import Bucket, FolderListing
from lmeval_screener.errors import ScreeningError

_SETTINGS = {
    "S3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket "
    "AWS_SKIP_SIGNATURE=true; for a service other than Amazon's also AWS_ENDPOINT_URL",
    "Google Cloud Storage": "GOOGLE_APPLICATION_CREDENTIALS (or run gcloud auth "
    "application-default login); for a public bucket GOOGLE_SKIP_SIGNATURE=true",
    "Azure": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN, "
    "or AZURE_STORAGE_CONNECTION_STRING); for a public container AZURE_SKIP_SIGNATURE=true",
}
#: Where a cloud's machines ask for credentials; it does not answer elsewhere.
_MACHINE_CREDENTIALS = ("169.254.", "metadata.google", "fd00:ec2")
_CONTENT_ETAG = re.compile(r"[0-9a-f]{32}(-\d+)?")
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_ADDRESS = re.compile(r"https?://\S+")
_PIECE = 1 << 16


class ObjectStore(Bucket):
    """One bucket of S3 or Google Cloud Storage, or one container of Azure.

    Args:
        address: Address of the bucket or container, such as ``s3://BUCKET``.

    Raises:
        ScreeningError: The address does not name a bucket.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        scheme, _, self._bucket = address.partition("://")
        if not self._bucket:
            raise ScreeningError(
                "BadName",
                f"expected {scheme}://BUCKET/FOLDER, got an address without a bucket; correct the "
                "address",
            )
        self._service = SERVICES[scheme]
        self._lock = asyncio.Lock()
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self._client: Any = None
        #: ETag and version of each listed object.
        self._versions: dict[str, tuple[str | None, str | None]] = {}

    async def listed(self, path: str, account: Account) -> FolderListing:
        """List a folder; see `Bucket.listed`.

        A listing counts as one request, and one more for every 1,000 names. Its bytes are not
        counted.
        """
        client = await self._connected()
        account.add(requests=1)
        try:
            result = await client.list_with_delimiter_async(path or None)
        except Exception as error:
            raise self._explained(error, path) from error
        start = len(path) + 1 if path else 0
        files = {}
        for meta in result["objects"]:
            name = meta["path"][start:]
            if name and "/" not in name:
                files[name] = FileEntry(name, meta["size"], self._digest(meta))
                self._versions[meta["path"]] = _bare(meta.get("e_tag")), meta.get("version")
        folders = [prefix.rstrip("/")[start:] for prefix in result["common_prefixes"]]
        account.add(requests=(len(files) + len(folders)) // 1000)
        return FolderListing(tuple(name for name in folders if name), files)

    async def read(
        self,
        path: str,
        entry: FileEntry,
        begin: int,
        end: int,
        received: bytearray,
        account: Account,
    ) -> None:
        """Append bytes of an object to ``received``; see `Bucket.read`.

        Raises:
            ScreeningError: The object is no longer the listed version, or access is refused.
            RetryError: The request failed, perhaps temporarily.
        """
        client = await self._connected()
        etag, version = self._versions[path]
        options: dict[str, Any] = {"range": (begin, end)}
        if etag:
            options["if_match"] = f'"{etag}"'
        if version and self._service == "Google Cloud Storage":
            options["version"] = version
        try:
            async with self._slots:
                account.add(requests=1)
                result = await client.get_async(path, options=options)
            meta = result.meta
            if etag and _bare(meta["e_tag"]) != etag:
                raise changed(f"{self.address}/{path}")
            if meta["size"] != entry.size or tuple(result.range) != (begin, end):
                raise contradiction(
                    f"expected bytes {begin} to {end} of {path} ({entry.size} in all) from "
                    f"{self.address}, got bytes {result.range[0]} to {result.range[1]} "
                    f"({meta['size']} in all)"
                )
            if end - begin <= _PIECE:
                # As one piece: each trip to obstore's threads costs more than the bytes.
                whole = bytes(await result.bytes_async())
                account.add(bytes_read=len(whole))
                received += whole
                return
            async for piece in result.stream(min_chunk_size=_PIECE):
                account.add(bytes_read=len(piece))
                received += bytes(piece)
        except (RetryError, ScreeningError, asyncio.CancelledError):
            raise
        except FileNotFoundError as error:
            raise changed(f"{self.address}/{path}") from error
        except Exception as error:
            raise self._explained(error, path) from error

    async def _connected(self) -> Any:
        """The bucket's client, made once in a thread, as it may read files and ask for credentials."""
        async with self._lock:
            if self._client is None:
                self._client = await in_thread(self._new_client)
            return self._client

    def _new_client(self) -> Any:
        try:
            from obstore.store import AzureStore, GCSStore, S3Store
        except ImportError:
            raise ScreeningError(
                "MissingExtra",
                f"reading from {self._service} needs the package obstore; run: pip install "
                "'lmeval-dispersion[cloud]'",
            ) from None
        common: dict[str, Any] = {
            "client_options": {
                "allow_http": True,
                "connect_timeout": f"{SILENCE:g}s",
                "read_timeout": f"{SILENCE:g}s",
                "timeout": "24h",  # the account limits it
                "user_agent": AGENT,
                **_network(),
            },
            "retry_config": {"max_retries": 0},
        }
        try:
            if self._service == "S3":
                return S3Store(self._bucket, **common, **_aws(self.address))
            if self._service == "Azure":
                container, _, host = self._bucket.partition("@")
                account = {"account_name": host.partition(".")[0]} if host else {}
                return AzureStore(container, **common, **{**_azure(), **account})
            return GCSStore(self._bucket, **common, **_google())
        except ScreeningError:
            raise
        except Exception as error:
            reason = _first_line(error)
            raise _denied(
                f"{self.address} cannot be opened ({reason}); set {_SETTINGS[self._service]}"
            ) from error

    def _digest(self, meta: Mapping[str, Any]) -> str | None:
        etag = _bare(meta.get("e_tag"))
        version = meta.get("version")
        if self._service == "S3" and etag and _CONTENT_ETAG.fullmatch(etag):
            # A hash of the content: a tokenizer stored with every checkpoint is read once.
            return version_digest(self.address, meta["size"], etag)
        if not etag and not version:
            return None
        return version_digest(self.address, meta["path"], meta["size"], etag, version)

    def _explained(self, error: Exception, path: str) -> Exception:
        """The error for a failure of obstore. Its text is not shown: it contains signed addresses."""
        text = str(error)
        kind = type(error).__name__
        where = self.address
        place = f"{where}/{path}" if path else where
        words = _ADDRESS.sub("", text).replace(path or where, "").replace(self._bucket, "").lower()
        stated = _STATUS.search(text)
        status = int(stated[1]) if stated else 0
        settings = f"set {_SETTINGS[self._service]}"
        reason = _first_line(error, place)
        if any(host in text for host in _MACHINE_CREDENTIALS):
            return _denied(f"no credentials for {where} were found; {settings}")
        if "expired" in words:
            return _denied(f"the credentials for {place} have expired; renew them, or {settings}")
        if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (400, 401, 403):
            return _denied(
                f"{self._service} refuses access to {place} ({status or kind}); {settings}"
            )
        if isinstance(error, FileNotFoundError) or status == 404:
            return ScreeningError(
                "FolderNotFound",
                f"{place} does not exist; check its name, and the endpoint and account in use",
            )
        if kind == "PreconditionError" or status == 412:
            return changed(place)
        if status == 429 or "<Code>SlowDown</Code>" in text or "<Code>ServerBusy</Code>" in text:
            what = f"the rate limit of {where} is used up ({status or kind}); try again later"
            return RetryError(ScreeningError("RateLimited", what))
        if "redirect" in words:
            return _denied(f"{place} is in another region; set AWS_REGION to the bucket's region")
        if status == 408 or status >= 500:
            what = f"{where} answered every attempt with status {status}; try again later"
            return RetryError(ScreeningError("ServerError", what))
        if "non-partial response" in text:
            return contradiction(
                f"the server of {where} ignores the header Range and would send the whole of {path}; "
                "download the checkpoint and screen its folder, or use a server that supports "
                "ranges",
                "RangeNotSupported",
            )
        if status or "Requested" in text or "Content-Range" in text:
            return contradiction(f"{where} gave an invalid response for {path} ({reason})")
        if "InvalidCertificate" in text:
            return untrusted(f"{where}'s server")
        if "error sending request" in text or "body error" in text or "HttpError" in text:
            what = f"the connection to {where} failed; check the network and the endpoint in use"
            return RetryError(ScreeningError("Unreachable", what))
        return contradiction(f"{place} cannot be read ({reason}); if access is missing, {settings}")


def _denied(what: str) -> ScreeningError:
    return ScreeningError("AccessDenied", what)


def _network() -> dict[str, Any]:
    """Settings for what obstore ignores: REQUESTS_CA_BUNDLE, and ports in NO_PROXY."""
    options: dict[str, Any] = {}
    bundle = os.environ.get("REQUESTS_CA_BUNDLE")
    if bundle and Path(bundle).is_file():
        options["root_certificate"] = Path(bundle).read_bytes()
    proxies = urllib.request.getproxies()
    excluded = [entry.strip() for entry in proxies.get("no", "").split(",")]
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http:")
    proxy = proxies.get("http" if plain else "https") or proxies.get("all")
    hosts = [_without_port(entry) for entry in excluded]
    if proxy and hosts != excluded:
        options["proxy_url"] = proxy
        options["proxy_excludes"] = ",".join(hosts)
    return options


def _without_port(entry: str) -> str:
    """A host of NO_PROXY; an IPv6 address is left as it is."""
    host, _, rest = entry.partition(":")
    return entry if ":" in rest else host


def _aws(address: str) -> dict[str, Any]:
    """Settings from botocore that obstore ignores, such as profiles and SSO."""
    settings: dict[str, Any] = {}
    if not any(os.environ.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION")):
        settings["region"] = "us-east-1"
    skip = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes", "on")
    if skip or (os.environ.get("AWS_ACCESS_KEY_ID") and not os.environ.get("AWS_PROFILE")):
        return settings
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        if os.environ.get("AWS_PROFILE"):
            raise ScreeningError(
                "MissingExtra",
                "AWS_PROFILE needs the package botocore; run: pip install "
                "'lmeval-dispersion[cloud]'",
            ) from None
        return settings
    try:
        session = botocore.session.get_session()
        credentials = session.get_credentials()
        profile = session.get_scoped_config()
    except botocore.exceptions.BotoCoreError as error:
        raise _denied(
            f"{address} cannot be opened ({_first_line(error)}); set {_SETTINGS['S3']}"
        ) from error
    if credentials is None:
        raise _denied(f"no credentials for {address} were found; set {_SETTINGS['S3']}")
    if region := session.get_config_variable("region"):
        settings["region"] = region
    if not os.environ.get("AWS_ENDPOINT_URL") and profile.get("endpoint_url"):
        settings["endpoint"] = profile["endpoint_url"]

    def provide() -> dict[str, Any]:
        from datetime import datetime, timedelta, timezone

        current = credentials.get_frozen_credentials()
        return {
            "access_key_id": current.access_key,
            "secret_access_key": current.secret_key,
            "token": current.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(minutes=5),
        }

    return {**settings, "credential_provider": provide}


def _azure() -> dict[str, Any]:
    """Settings from AZURE_STORAGE_CONNECTION_STRING, which obstore ignores."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    names = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "BlobEndpoint": "endpoint",
        "SharedAccessSignature": "sas_key",
    }
    return {names[key]: value for key, value in parts.items() if key in names}


def _google() -> dict[str, Any]:
    """Settings for the emulator in STORAGE_EMULATOR_HOST, as Google's libraries read it."""
    host = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if not host:
        return {}
    return {"base_url": host if "://" in host else f"http://{host}", "skip_signature": True}


def _bare(etag: str | None) -> str | None:
    """An ETag without its quotes, which Azure's responses have and its listing lacks."""
    return etag.removeprefix("W/").strip('"') if etag else None


def _first_line(error: Exception, place: str = "") -> str:
    return _ADDRESS.sub(lambda _: place or "its address", first_line(error))[:200]
