"""Files of an object store by fsspec URL: listed, read by ranges, written and compared. What fails is tried again.

A network forgets, cuts off and answers late, so no answer is believed before it has the bytes that were asked for, and
nothing counts as written before it was read back. What no trial would change (no such file, no access) is told at once.
"""

import logging
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar

from trilobite.errors import MissingExtraError, SettingError, StoreError, TrilobiteError, one_line

T = TypeVar("T")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
TRIES = 6
PAUSE = 1.0
"""Seconds before the second trial; twice as many before each further one."""
PIECE = 32 * 2**20
"""Bytes of one request: what a fault costs."""
S3_PATIENCE = {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 3}}
"""Of botocore, which else tries for minutes before it tells."""
GS_PATIENCE = {"total": 600, "sock_connect": 10, "sock_read": 30}
"""Of gcsfs, which else waits for ever; the first one is for 50 MiB that are sent."""
BUGS = (AssertionError, AttributeError, NameError, TypeError)
NO_ACCESS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}
"""Names of others' errors that are no PermissionError and say the same."""
TAGS = ("ETag", "etag", "blob_id", "xet_hash", "LastModified", "updated")
"""What stores say of an object that changes with its bytes; the first that they have tells."""
CHANGED = "changed since it was opened; wait until it is complete and run again"


def is_url(path: str | Path) -> bool:
    """Whether this is a URL, and no folder or hub id."""
    return isinstance(path, str) and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", path) is not None


def join(url: str, name: str) -> str:
    """The URL of a file in a folder."""
    return f"{url.rstrip('/')}/{name}"


def filesystem(url: str) -> Any:
    """fsspec's file system for a URL, one a process.

    Raises SettingError for a kind of URL that is not read here, MissingExtraError where a package is missing.
    """
    return _filesystem(url.partition("://")[0], os.getpid())


@lru_cache
def _filesystem(protocol: str, process: int) -> Any:
    if protocol not in PACKAGES:
        raise SettingError(
            f"{protocol}://: no kind of URL that is read here; expected {', '.join(f'{p}://' for p in PACKAGES)}"
        )
    import fsspec

    options: dict[str, Any] = {}
    if protocol == "s3":
        configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {**S3_PATIENCE, **configured}
    try:
        if protocol == "gs":
            options |= _gs_options()
        return fsspec.filesystem(protocol, **options)
    except ImportError as e:
        package = PACKAGES[protocol]
        raise MissingExtraError(
            f"{protocol}:// needs {package}: pip install {package}, or 'trilobite[remote]' for all kinds"
        ) from e


def _gs_options() -> dict[str, Any]:
    """Of gcsfs: an end to waiting, nothing remembered of objects, and none of the tracebacks that it logs.

    It raises what it logs, too. Raises ImportError.
    """
    import fsspec
    from aiohttp import ClientTimeout

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    own = {"requests_timeout": ClientTimeout(**GS_PATIENCE), "use_listings_cache": False}
    return {**own, **fsspec.config.conf.get("gs", {})}


def patiently(url: str, call: Callable[[], T]) -> T:
    """What a call returns in the end. Raises StoreError when it never does, or when trying again is no use."""
    began = time.monotonic()
    for trial in range(1, TRIES + 1):
        try:
            return call()
        except (TrilobiteError, *BUGS):
            raise
        except Exception as e:  # each package has its own
            if told := _final(e):
                raise StoreError(f"{url}: {told}") from e
            last = e
        if trial < TRIES:
            time.sleep(PAUSE * 2 ** (trial - 1) * random.uniform(0.75, 1.25))
    raise StoreError(
        f"{url}: failed {TRIES} times in {time.monotonic() - began:.0f} s, at last: {type(last).__name__} "
        f"{one_line(last)}; nothing is lost: run the same command again when the store answers"
    ) from last


def _final(e: Exception) -> str:
    """What to tell of an error that stays; empty for one that may pass."""
    if type(e).__name__ == "FileExpired":  # s3fs asks for the tag with every range
        return CHANGED
    status = getattr(getattr(e, "response", None), "status_code", None) or getattr(e, "code", None)
    forbidden = isinstance(e, PermissionError) or str(e).startswith("Forbidden: ")  # gcsfs
    if forbidden or type(e).__name__ in NO_ACCESS or status in (401, 403):
        return (
            f"no access ({one_line(e)}); check the name and the credentials (`aws configure`, "
            "`gcloud auth application-default login`, `hf auth login`)"
        )
    if isinstance(e, FileNotFoundError) or status == 404:
        return f"not there ({one_line(e)}); check the name"
    if isinstance(e, JSONDecodeError):  # of an answer that was cut off
        return ""
    return f"{one_line(e)}; check the URL" if isinstance(e, ValueError | NotImplementedError) else ""


def tag_of(info: Mapping[str, Any]) -> str:
    """What tells an object from the one that was there before, as far as the store says."""
    return next((f"{key} {info[key]}" for key in TAGS if info.get(key)), "")


def listing(url: str) -> dict[str, Mapping[str, Any]]:
    """What a folder holds, by name, as the store describes it: `size`, `type`, and more. Empty where there is none."""
    fs = filesystem(url)

    def look() -> list[Mapping[str, Any]]:
        fs.invalidate_cache()
        try:
            return list(fs.ls(url, detail=True))
        except FileNotFoundError:
            return []

    folder = fs._strip_protocol(url).rstrip("/")
    names = {str(info["name"]).rstrip("/"): info for info in patiently(url, look)}
    return {name.rpartition("/")[2]: info for name, info in names.items() if name != folder}


def read_range(url: str, start: int, nbytes: int, size: int, tag: str | None = None) -> bytes:
    """Bytes of an object of so many bytes, all of them. Raises StoreError, also when it is not the one of that tag."""
    fs = filesystem(url)

    def read() -> bytes:
        with fs.open(url, "rb", cache_type="none") as file:
            if tag is not None and (file.size, tag_of(file.details)) != (size, tag):
                raise StoreError(f"{url}: {CHANGED}")
            file.seek(start)
            data = bytes(file.read(nbytes))
        if len(data) != nbytes:
            raise OSError(f"{len(data)} of {nbytes} bytes came")
        return data

    return patiently(url, read)


def check_tag(url: str, size: int, tag: str) -> None:
    """Ask the store. Raises StoreError where the object is another one now."""
    fs = filesystem(url)

    def look() -> Mapping[str, Any]:
        fs.invalidate_cache(fs._parent(fs._strip_protocol(url)))
        return fs.info(url)  # type: ignore[no-any-return]

    info = patiently(url, look)
    if (info["size"], tag_of(info)) != (size, tag):
        raise StoreError(f"{url}: {CHANGED}")


def put(path: Path, url: str) -> None:
    """Write a file to a URL and read it back: the store holds these bytes once this returns. Raises StoreError."""
    fs = filesystem(url)

    def write() -> None:
        fs.put_file(str(path), fs._strip_protocol(url))
        fs.invalidate_cache(fs._parent(fs._strip_protocol(url)))
        if (found := fs.info(url)["size"]) != path.stat().st_size:
            raise OSError(f"{found} bytes are there, {path.stat().st_size} were sent")
        with path.open("rb") as file:
            for start in range(0, found, PIECE):
                sent = file.read(PIECE)
                if read_range(url, start, len(sent), found) != sent:
                    raise OSError(f"what is there differs from what was sent, after byte {start}")

    patiently(url, write)


def remove(url: str) -> None:
    """Remove a folder with all that it holds; what may not be removed stays. Raises StoreError."""
    fs = filesystem(url)

    def clear() -> None:
        fs.invalidate_cache()
        with suppress(FileNotFoundError, PermissionError):
            fs.rm(fs._strip_protocol(url), recursive=True)

    patiently(url, clear)
