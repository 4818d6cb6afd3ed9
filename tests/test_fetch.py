"""Fetching pages: politely, once, and never where it must not."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("httpx")
pytest.importorskip("trafilatura")

from groupwise.retrieval.fetch import Manners, PageCache, fetch_pages

ARTICLE = "<html><body><nav>Menu</nav><article>" + "<p>Foxes eat mice and berries at night in winter.</p>" * 5
PAGES = {
    "/robots.txt": (200, "text/plain", "User-agent: *\nDisallow: /secret\n"),
    "/fox": (200, "text/html", ARTICLE),
    "/secret/x": (200, "text/html", ARTICLE),
    "/old": (301, "/fox", ""),
    "/loop": (302, "/loop", ""),
    "/gone": (404, "text/html", "404"),
    "/image": (200, "image/png", "png"),
    "/large": (200, "text/html", "x" * 20_000),
    "/404-facts": (200, "text/html", ARTICLE.replace("night", "404")),
}


@pytest.fixture
def site():
    asked: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] += 1
            if self.path == "/flaky" and asked[self.path] < 3:
                status, kind, body = 503, "text/html", ""
            else:
                status, kind, body = PAGES.get(self.path, PAGES["/fox"])
            self.send_response(status)
            self.send_header("Location" if 300 <= status < 400 else "Content-Type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


HERE = Manners(allow_private=True, pause=0.0, back_off=0.01, largest=10_000, timeout=5.0)


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


def test_private_addresses_and_other_schemes_are_refused(site, tmp_path):
    root, asked = site
    found = fetch_pages([f"{root}/fox", "file:///etc/passwd"], PageCache(tmp_path), Manners())
    assert sorted(found.problems.values()) == ["not http", "private or unknown address"]
    assert not asked
