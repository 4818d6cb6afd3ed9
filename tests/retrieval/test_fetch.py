"""Fetching pages: politely, once, and never where it must not."""

from __future__ import annotations

import codecs
import gzip
import json
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("httpx")
pytest.importorskip("trafilatura")

from groupwise import cli
from groupwise.retrieval.fetch import CHARSETS, FetchPolicy, PageCache, charset_of, fetch_pages

ARTICLE = "<html><body><nav>Menu</nav><article>" + "<p>Foxes eat mice and berries at night in winter.</p>" * 5
PAGES = {
    "/robots.txt": (200, "text/plain", "User-agent: *\nDisallow: /secret\n"),
    "/fox": (200, "text/html", ARTICLE),
    "/secret/x": (200, "text/html", ARTICLE),
    "/old": (301, "/fox", ""),
    "/loop": (302, "/loop", ""),
    "/unchanged": (304, "", ""),
    "/nowhere": (301, "", ""),
    "/to-bad": (301, "http://[bad/x", ""),
    "/codec": (200, "text/html; charset=base64", ARTICLE),
    "/punycode": (200, "text/html; charset=punycode", ARTICLE),
    "/latin": (200, "text/html; charset=ISO-8859-1", ARTICLE),
    "/no-such": (200, "text/html; charset=no-such", ARTICLE),
    "/down": (503, "text/html", ""),
    "/busy": (429, "text/html", ""),
    "/gone": (404, "text/html", "404"),
    "/image": (200, "image/png", "png"),
    "/large": (200, "text/html", "x" * 20_000),
    "/tables": (200, "text/html", ARTICLE + "<table><tr><td>a</td></tr></table>" * 40_000),
    "/404-facts": (200, "text/html", ARTICLE.replace("night", "404")),
}


BOMB = gzip.compress(b"x" * 50_000, mtime=0)
RAW = zlib.compressobj(wbits=-zlib.MAX_WBITS)
PACKED = {
    "/gzip": ("gzip", gzip.compress(ARTICLE.encode())),
    "/deflate": ("deflate", zlib.compress(ARTICLE.encode())),
    "/raw": ("deflate", RAW.compress(ARTICLE.encode()) + RAW.flush()),
    "/bomb": ("gzip", BOMB),
    "/nested": ("gzip, gzip", gzip.compress(BOMB)),
    "/damaged": ("gzip", b"not gzip"),
    "/zstd": ("zstd", b"?"),
}


def drip(write: Callable[[bytes], object], ended: threading.Event) -> None:
    """Send a byte now and then, for as long as somebody listens."""
    with suppress(OSError):
        while not ended.wait(0.05):
            write(b"x")


@pytest.fixture
def site():
    asked: Counter[str] = Counter()
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] += 1
            if self.path == "/flaky" and asked[self.path] < 3:
                status, kind, body = 503, "text/html", ""
            else:
                status, kind, body = PAGES.get(self.path, PAGES["/fox"])
            self.send_response(status)
            if kind:
                self.send_header("Location" if 300 <= status < 400 else "Content-Type", kind)
            if self.path in PACKED:
                encoding, packed = PACKED[self.path]
                self.send_header("Content-Encoding", encoding)
            self.end_headers()
            if self.path == "/drip":
                drip(self.wfile.write, ended)
            self.wfile.write(packed if self.path in PACKED else body.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    ended.set()
    server.shutdown()
    server.server_close()


HERE = FetchPolicy(allow_private=True, pause=0.0, back_off=0.01, largest=10_000, timeout=5.0)


def test_pages_are_fetched_once_and_what_fails_says_why(site, tmp_path):
    root, asked = site
    paths = [
        "/fox",
        "/fox",
        "/old",
        "/flaky",
        "/404-facts",
        "/secret/x",
        "/loop",
        "/gone",
        "/image",
        "/large",
    ]
    found = fetch_pages([root + path for path in paths], PageCache(tmp_path), HERE)
    assert {url.removeprefix(root) for url in found.texts} == {"/fox", "/old", "/flaky", "/404-facts"}
    assert found.texts[f"{root}/fox"].startswith("Foxes eat mice")
    assert "Menu" not in found.texts[f"{root}/fox"]
    assert {url.removeprefix(root): why for url, why in found.problems.items()} == {
        "/secret/x": "robots.txt",
        "/loop": "too many redirects",
        "/gone": "status 404",
        "/image": "type image/png",
        "/large": "too large",
    }
    assert asked["/robots.txt"] == 1
    assert asked["/secret/x"] == 0


def test_what_is_there_is_not_fetched_again(site, tmp_path):
    root, asked = site
    for _ in range(2):
        fetch_pages([f"{root}/fox"], PageCache(tmp_path), HERE)
    assert asked["/fox"] == 1
    fetch_pages([f"{root}/fox"], PageCache(tmp_path), HERE, skip_existing=False)
    assert asked["/fox"] == 2


def test_between_two_requests_to_a_host_there_is_a_pause(site, tmp_path):
    root, _ = site
    began = time.monotonic()
    slowly = replace(HERE, pause=0.1, per_host=1)
    assert len(fetch_pages([f"{root}/fox?{n}" for n in range(3)], PageCache(tmp_path), slowly).texts) == 3
    assert time.monotonic() - began >= 0.2


def test_private_addresses_and_other_schemes_are_refused(site, tmp_path):
    root, asked = site
    found = fetch_pages([f"{root}/fox", "file:///etc/passwd"], PageCache(tmp_path), FetchPolicy())
    assert sorted(found.problems.values()) == ["not http", "private address"]
    assert not asked


def test_a_failure_that_may_pass_is_tried_again_by_a_later_run(site, tmp_path, monkeypatch):
    root, asked = site
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/x"
        urls = [dead, *(root + path for path in ("/down", "/busy", "/gone"))]
        found = fetch_pages(urls, PageCache(tmp_path), HERE)
    assert [found.problems[url] for url in urls] == ["ConnectError", "status 503", "status 429", "status 404"]
    assert PageCache(tmp_path).get(dead) is None
    assert asked["/down"] == 1 + HERE.retries
    for path in ("/down", "/busy", "/gone"):
        monkeypatch.setitem(PAGES, path, PAGES["/fox"])
    again = fetch_pages(urls, PageCache(tmp_path), HERE)
    assert set(again.texts) == {f"{root}/down", f"{root}/busy"}
    assert again.problems[f"{root}/gone"] == "status 404"
    assert asked["/gone"] == 1


def test_a_page_refused_for_its_address_is_fetched_once_that_is_allowed(site, tmp_path):
    root, _ = site
    assert not fetch_pages([f"{root}/fox"], PageCache(tmp_path), FetchPolicy()).texts
    assert fetch_pages([f"{root}/fox"], PageCache(tmp_path), HERE).texts


@pytest.mark.parametrize("manners", [HERE, FetchPolicy()])
def test_an_address_that_is_none_is_a_failed_page_and_not_the_end(site, tmp_path, manners):
    bad = [
        "http://[bad/x",
        "http://example.com:abc/",
        "http://127.0.0.1:99999/",
        "http://.example.com/",
        f"http://{'a' * 64}.example.com/",
        "http://example.com/\0",
    ]
    found = fetch_pages([*bad, f"{site[0]}/fox"], PageCache(tmp_path), manners)
    assert {url: found.problems[url] for url in bad} == dict.fromkeys(bad, "not a URL")
    assert len(found.texts) == int(manners.allow_private)


def test_an_answer_that_makes_no_sense_is_a_failed_page_and_not_the_end(site, tmp_path):
    root, _ = site
    paths = ["/unchanged", "/nowhere", "/to-bad", "/codec", "/fox"]
    found = fetch_pages([root + path for path in paths], PageCache(tmp_path), HERE)
    assert {url.removeprefix(root): why for url, why in found.problems.items()} == {
        "/unchanged": "status 304",
        "/nowhere": "status 301",
        "/to-bad": "not a URL",
        "/codec": "charset base64",
    }
    assert list(found.texts) == [f"{root}/fox"]


def test_a_page_is_unpacked_once_and_no_further_than_its_limit(site, tmp_path):
    root, _ = site
    found = fetch_pages([root + path for path in PACKED], PageCache(tmp_path), HERE)
    assert {url.removeprefix(root) for url in found.texts} == {"/gzip", "/deflate", "/raw"}
    assert {url.removeprefix(root): why for url, why in found.problems.items()} == {
        "/bomb": "too large",
        "/nested": "encoding gzip, gzip",
        "/damaged": "damaged gzip",
        "/zstd": "encoding zstd",
    }
    assert len(BOMB) < 1000


def test_a_page_that_never_ends_is_given_up(site, tmp_path):
    root, asked = site
    hurried = replace(HERE, page_seconds=0.5)
    found = fetch_pages([f"{root}/drip", f"{root}/fox"], PageCache(tmp_path), hurried)
    assert found.problems == {f"{root}/drip": "took longer than 0.5 s"}
    assert list(found.texts) == [f"{root}/fox"]
    assert asked["/drip"] == 1  # trying again would take as long again


def test_a_page_whose_text_takes_too_long_to_extract_is_given_up_alone(site, tmp_path):
    root, _ = site
    policy = replace(HERE, largest=3_000_000, extract_seconds=0.3)
    result = fetch_pages([root + "/tables", root + "/fox"], PageCache(tmp_path), policy)
    assert result.problems == {
        root + "/tables": "extracting its text took more than 0.3 s or too much memory"
    }
    assert result.texts[root + "/fox"].startswith("Foxes eat mice")
    assert PageCache(tmp_path).get(root + "/tables") is None  # a faster machine may try again


def test_only_charsets_of_the_web_are_decoded(site, tmp_path):
    root, _ = site
    found = fetch_pages(
        [root + path for path in ("/punycode", "/latin", "/no-such")], PageCache(tmp_path), HERE
    )
    assert found.problems == {f"{root}/punycode": "charset punycode"}
    assert len(found.texts) == 2


def test_the_charsets_of_the_web_go_by_the_names_that_python_has_for_them():
    for name in ("UTF-8", "latin1", "windows-1252", "Shift_JIS", "euc-jp", "GBK", "Big5", "KOI8-R", "x-sjis"):
        charset_of(name)
    assert charset_of("windows-1251") == "cp1251"
    assert {codecs.lookup(name).name for name in CHARSETS} == CHARSETS


def test_where_no_page_can_be_fetched_the_command_says_why(site, tmp_path, capsys):
    root, _ = site
    urls = [f"{root}/secret/{n}" for n in range(2)] + [f"{root}/gone"]
    rows = tmp_path / "rows.jsonl"

    def said(*words: str) -> str:
        where = ["--data", str(rows), "--output", str(tmp_path / "index"), "--pages", str(tmp_path / "pages")]
        assert cli.main(["index", "build", "--fetch", *where, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    rows.write_text("".join(json.dumps({"question": "q?", "answer": "a", "url": url}) + "\n" for url in urls))
    assert said() == (
        "error: none of 3 pages could be fetched: 3 × private address; use --allow-private to fetch from "
        "private addresses"
    )
    assert said("--allow-private") == (
        "error: none of 3 pages could be fetched: 2 × robots.txt, 1 × status 404"
    )
    rows.write_text(json.dumps({"question": "q?", "answer": "a", "url": "http://no-such-host.invalid/"}))
    assert said() == "error: none of 1 pages could be fetched: 1 × unknown host"
    rows.write_text(json.dumps({"question": "q?", "answer": "a", "doc": "d"}))
    assert "no row with an answer has a `url`" in said()
    assert not (tmp_path / "index").exists()
