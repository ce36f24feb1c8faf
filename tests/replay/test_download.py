"""Downloads from a real HTTP server that can break off, refuse ranges and lie."""

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from replay.datasets import DatasetError, download, movielens
from replay.local_stack import free_port

DATA = bytes(range(256)) * 400
MD5 = hashlib.md5(DATA).hexdigest()


@dataclass
class Site:
    """What the server has and how it behaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    breaks_after: int | None = None  # bytes of each answer's body
    ranges: bool = True
    status: int | None = None  # answers this to everything
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path, Range
    url: str = ""


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            made.asked.append((self.path, wanted))
            body = made.files.get(self.path)
            if made.status or body is None:
                self.send_error(made.status or 404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and made.ranges else 0
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206 if wanted and made.ranges else 200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            self.wfile.write(body[start:][: made.breaks_after])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield made
        server.shutdown()
        thread.join()


def test_a_file_is_fetched_and_verified(site: Site, tmp_path: Path) -> None:
    site.files["/ml.zip"] = DATA
    target = tmp_path / "cache" / "ml.zip"
    assert download.fetch(f"{site.url}/ml.zip", target, MD5) == target
    assert target.read_bytes() == DATA
    assert list(target.parent.iterdir()) == [target]


def test_the_checksum_beside_the_file_is_used_where_none_is_known(site: Site, tmp_path: Path) -> None:
    site.files |= {"/ml.zip": DATA, "/ml.zip.md5": f"MD5 (ml.zip) = {MD5}\n".encode()}
    assert download.fetch(f"{site.url}/ml.zip", tmp_path / "ml.zip").read_bytes() == DATA
    site.files["/ml.zip.md5"] = b"0" * 32
    with pytest.raises(DatasetError, match="checksum"):
        download.fetch(f"{site.url}/ml.zip", tmp_path / "other.zip")


def test_bytes_that_are_not_the_right_ones_are_thrown_away(site: Site, tmp_path: Path) -> None:
    site.files["/ml.zip"] = DATA[:-1] + b"?"
    with pytest.raises(DatasetError, match="checksum"):
        download.fetch(f"{site.url}/ml.zip", tmp_path / "ml.zip", MD5)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_breaks_off_goes_on_where_it_was(site: Site, tmp_path: Path) -> None:
    site.files["/ml.zip"] = DATA
    site.breaks_after = len(DATA) // 2
    assert download.fetch(f"{site.url}/ml.zip", tmp_path / "ml.zip", MD5).read_bytes() == DATA
    assert site.asked == [("/ml.zip", None), ("/ml.zip", f"bytes={len(DATA) // 2}-")]


def test_a_later_call_goes_on_from_what_an_earlier_one_kept(site: Site, tmp_path: Path) -> None:
    site.files["/ml.zip"] = DATA
    site.breaks_after = 100
    with pytest.raises(download.UnreachableError, match="broke off after 300 bytes"):
        download.fetch(f"{site.url}/ml.zip", tmp_path / "ml.zip", MD5)
    site.breaks_after = None
    site.asked.clear()
    assert download.fetch(f"{site.url}/ml.zip", tmp_path / "ml.zip", MD5).read_bytes() == DATA
    assert site.asked == [("/ml.zip", "bytes=300-")]


def test_a_server_without_ranges_sends_it_all_again(site: Site, tmp_path: Path) -> None:
    site.files["/ml.zip"] = DATA
    site.ranges = False
    (tmp_path / "ml.zip.part").write_bytes(b"x" * 1000)
    assert download.fetch(f"{site.url}/ml.zip", tmp_path / "ml.zip", MD5).read_bytes() == DATA


def test_a_part_that_was_complete_already_is_taken(site: Site, tmp_path: Path) -> None:
    site.files["/ml.zip"] = DATA
    (tmp_path / "ml.zip.part").write_bytes(DATA)
    assert download.fetch(f"{site.url}/ml.zip", tmp_path / "ml.zip", MD5).read_bytes() == DATA


@pytest.mark.parametrize(("status", "expected"), [(404, DatasetError), (503, download.UnreachableError)])
def test_an_answer_that_is_not_the_file_is_told_with_its_status(
    site: Site, tmp_path: Path, status: int, expected: type[Exception]
) -> None:
    site.status = status
    with pytest.raises(expected, match=str(status)):
        download.fetch(f"{site.url}/ml.zip", tmp_path / "ml.zip", MD5)


def test_only_http_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="only http"):
        download.fetch("file:///etc/passwd", tmp_path / "x", MD5)


def test_movielens_is_downloaded_once(site: Site, tmp_path: Path) -> None:
    site.files["/ml-latest-small.zip"] = _zip(
        {"ml-latest-small/ratings.csv": b"userId,movieId,rating,timestamp\n1,2,3.5,881250949\n"}
    )
    for _ in range(2):
        dataset = movielens.load("latest-small", cache_dir=tmp_path, home=site.url)
        assert [event.value for event in dataset.interactions()] == [3.5]
    assert [path for path, _ in site.asked].count("/ml-latest-small.zip") == 1


def test_movielens_out_of_reach_says_what_to_put_where(tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(DatasetError) as caught:
        movielens.load("1m", cache_dir=tmp_path, home=nowhere)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("127.0.0.1 cannot be reached", "ml-1m.zip", str(tmp_path), "--path"):
        assert part in message


def test_an_unknown_version_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="100k, latest-small, 1m, 10m, 20m, 25m, 32m"):
        movielens.load("2k", cache_dir=tmp_path)


@pytest.mark.integration
def test_movielens_100k_out_of_reach_comes_from_the_recbole_package_with_its_titles(tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    said: list[str] = []
    dataset = movielens.load("100k", cache_dir=tmp_path, home=nowhere, say=said.append)
    assert len(said) == 1
    assert "recbole" in said[0]
    events = list(dataset.interactions())
    assert len(events) == 100_000
    assert len(dataset.items()) == 1682
    # the first of u.data's rows at the earliest time, and ties as u.data has them
    assert [(event.user, event.item) for event in events[:3]] == [("259", "255"), ("259", "286"), ("259", "298")]
    assert all(before.timestamp_ms <= after.timestamp_ms for before, after in pairwise(events))
    said.clear()
    assert len(movielens.load("100k", cache_dir=tmp_path, home=nowhere, say=said.append)) == 100_000
    assert said == []


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()
