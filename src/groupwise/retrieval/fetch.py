"""Fetch web pages politely: each once, with few connections per host, respecting robots.txt.

Only http and https, no private addresses unless allowed, and no page that is too large, too slow or not
text. Pages are cached as they arrive, so an interrupted run continues where it stopped. Temporary failures
are not cached, so a later run retries those pages.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import ipaddress
import json
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.robotparser import RobotFileParser

from groupwise.errors import ConfigError
from groupwise.isolation.worker import Worker, WorkerLost, cannot_fork

AGENT = "groupwise-index"
REDIRECTS = 5
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The `wbits` argument of zlib for each content encoding."""
CHARSETS = {
    *("utf-8", "utf-16", "utf-16-le", "utf-16-be", "ascii", "koi8-r", "koi8-u", "mac-roman", "mac-cyrillic"),
    *("gb2312", "gbk", "gb18030", "big5", "big5hkscs", "euc_jp", "iso2022_jp", "shift_jis", "cp932"),
    *("euc_kr", "cp949", "cp866", "cp874", "tis-620"),
    *(f"cp125{number}" for number in range(9)),
    *(f"iso8859-{number}" for number in range(1, 17) if number != 12),  # there is no part 12
}
"""Character sets of the web, by Python's names. Some of Python's other codecs take quadratic time."""


REASONS = 5
"""Maximum number of reasons in the error message if no page could be fetched."""
UNKNOWN_HOST, PRIVATE = "unknown host", "private address"


class FetchRefused(Exception):
    """A page was not fetched; the message is a short reason."""


class TemporaryFetchError(FetchRefused):
    """A reason that may not apply to a later run, or with other settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    """Limits and rules for fetching."""

    together: int = 16
    """Maximum number of concurrent requests."""
    per_host: int = 2
    """Maximum number of concurrent requests to one host."""
    pause: float = 0.2
    """Seconds between two requests on one connection slot of a host."""
    timeout: float = 20.0
    """Seconds without data after which a request fails."""
    page_seconds: float = 120.0
    """Maximum total seconds of one request."""
    extract_seconds: float = 20.0
    """Maximum seconds to extract the text of one page."""
    largest: int = 5_000_000
    """Maximum bytes of a page, compressed and decompressed."""
    retries: int = 3
    back_off: float = 1.0
    """Seconds before the first retry; doubles with each further retry."""
    allow_private: bool = False
    robots: bool = True


@dataclass(slots=True)
class PageCache:
    """One JSON file per page, named by a hash of its URL: {url, text} or {url, problem}."""

    folder: Path

    def path(self, url: str) -> Path:
        return self.folder / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"

    def get(self, url: str) -> dict[str, str] | None:
        try:
            page: dict[str, str] = json.loads(self.path(url).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return page if page.get("url") == url else None

    def put(self, url: str, **page: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.path(url).with_suffix(".new")
        fresh.write_text(json.dumps({"url": url, **page}, ensure_ascii=False), encoding="utf-8")
        fresh.replace(self.path(url))


@dataclass(slots=True)
class FetchResult:
    """Texts by URL, and the problems of pages that could not be fetched."""

    texts: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ConfigError if no page was fetched, with the reasons."""
        if self.texts:
            return
        if not self.problems:
            raise ConfigError("nothing to fetch: no row with an answer has a `url` or `document_url`")
        reasons = Counter(self.problems.values()).most_common()
        hint = "; use --allow-private to fetch from private addresses" if PRIVATE in dict(reasons) else ""
        raise ConfigError(
            f"none of {len(self.problems)} pages could be fetched: "
            + ", ".join(f"{count} × {reason}" for reason, count in reasons[:REASONS])
            + hint
        )

    def summary(self) -> dict[str, Any]:
        return {"fetched": len(self.texts), "failed": dict(Counter(self.problems.values()).most_common())}


def fetch_pages(
    urls: Iterable[str],
    cache: PageCache,
    policy: FetchPolicy,
    *,
    skip_existing: bool = True,
    on_page: Callable[[int, int], None] = lambda done, total: None,
) -> FetchResult:
    """Fetch each distinct URL once and return the main text of each page."""
    try:
        import httpx  # noqa: F401
        import trafilatura  # noqa: F401 — before the worker is forked, which inherits it
    except ImportError:
        raise ConfigError("fetching pages requires an extra: pip install 'groupwise[retrieval]'") from None
    with TextExtractor(policy.extract_seconds) as extractor:
        fetcher = Fetcher(cache, policy, extractor)
        return asyncio.run(fetcher.fetch(list(dict.fromkeys(urls)), skip_existing, on_page))


class TextExtractor:
    """Extracts text in a worker process that is killed when a page takes too long.

    The time can grow with the square of a page's size, as with many small tables. Where processes
    cannot be forked, text is extracted in this process, without a limit.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._resources = ExitStack()
        self._worker: Worker | None = None

    def __enter__(self) -> TextExtractor:
        if cannot_fork() is None:
            self._worker = self._resources.enter_context(Worker({"text": self.texts}))
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    @staticmethod
    def texts(html: str, seconds: float) -> Iterator[str]:
        yield main_text(html)

    def extract(self, html: str) -> str:
        """Return the main text; raise TemporaryFetchError if that takes too long or too much memory."""
        if self._worker is None:
            return main_text(html)
        try:
            (text,) = self._worker.replies("text", html, seconds=self.seconds)
        except WorkerLost:
            raise TemporaryFetchError(
                f"extracting its text took more than {self.seconds:g} s or too much memory"
            ) from None
        return str(text)


class Fetcher:
    """Fetches a list of pages concurrently."""

    def __init__(self, cache: PageCache, policy: FetchPolicy, extractor: TextExtractor) -> None:
        self.cache, self.policy, self.extractor = cache, policy, extractor
        self._hosts: dict[str, asyncio.Semaphore] = {}
        self._robots: dict[str, asyncio.Task[RobotFileParser | None]] = {}

    async def fetch(
        self, urls: list[str], skip_existing: bool, on_page: Callable[[int, int], None]
    ) -> FetchResult:
        import httpx

        result, done = FetchResult(), 0
        concurrency = asyncio.Semaphore(self.policy.together)
        headers = {"User-Agent": AGENT, "Accept-Encoding": "gzip, deflate"}
        async with httpx.AsyncClient(timeout=self.policy.timeout, headers=headers) as client:

            async def one(url: str) -> None:
                nonlocal done
                page = self.cache.get(url) if skip_existing else None
                if page is None:
                    async with concurrency:
                        page = await self._page(client, url)
                if "text" in page:
                    result.texts[url] = page["text"]
                else:
                    result.problems[url] = page["problem"]
                done += 1
                on_page(done, len(urls))

            await asyncio.gather(*map(one, urls))
        return result

    async def _page(self, client: Any, url: str) -> dict[str, str]:
        """Return a page's text or its problem, and cache both unless the problem is temporary."""
        try:
            text = await asyncio.to_thread(self.extractor.extract, await self._html(client, url))
        except TemporaryFetchError as reason:
            return {"problem": str(reason)}
        except FetchRefused as reason:
            page = {"problem": str(reason)}
        except Exception as error:  # a failure on one page must not abort the others
            return {"problem": type(error).__name__}
        else:
            page = {"text": text} if text else {"problem": "no main text"}
        self.cache.put(url, **page)
        return page

    async def _html(self, client: Any, url: str) -> str:
        """Return the HTML of a page. Follows redirects itself, to check each address before the request."""
        url = absolute_url(url)
        for _ in range(REDIRECTS + 1):
            await self._check(client, url)
            status, location, body = await self._with_retries(client, url)
            if location is None:
                if status >= 300:
                    raise FetchRefused(f"status {status}")
                return body
            url = absolute_url(location, base=url)
        raise FetchRefused("too many redirects")

    async def _with_retries(self, client: Any, url: str) -> tuple[int, str | None, str]:
        import httpx

        host = self._hosts.setdefault(urlsplit(url).netloc, asyncio.Semaphore(self.policy.per_host))
        for attempt in range(self.policy.retries + 1):
            if attempt:
                await asyncio.sleep(self.policy.back_off * 2 ** (attempt - 1))
            async with host:
                try:
                    status, location, body = await self._once(client, url)
                except httpx.TimeoutException:
                    problem = "timed out"
                except httpx.HTTPError as error:
                    problem = type(error).__name__
                else:
                    if status != 429 and status < 500:
                        return status, location, body
                    problem = f"status {status}"
                finally:
                    await asyncio.sleep(self.policy.pause)
        raise TemporaryFetchError(problem)

    async def _once(self, client: Any, url: str) -> tuple[int, str | None, str]:
        """Make one request with a limit on its total time, against hosts that send very slowly."""
        try:
            async with asyncio.timeout(self.policy.page_seconds):
                return await self._request(client, url)
        except TimeoutError:
            raise TemporaryFetchError(f"took longer than {self.policy.page_seconds:g} s") from None

    async def _request(self, client: Any, url: str) -> tuple[int, str | None, str]:
        largest = self.policy.largest
        async with client.stream("GET", url, follow_redirects=False) as response:
            if response.has_redirect_location:
                return response.status_code, response.headers["location"], ""
            if response.status_code >= 300:
                return response.status_code, None, ""
            kind = response.headers.get("content-type", "text/html").partition(";")[0].strip()
            if kind not in ("text/html", "application/xhtml+xml", "text/plain"):
                raise FetchRefused(f"type {kind}")
            charset = charset_of(response.charset_encoding)
            body = bytearray()
            async for part in response.aiter_raw():
                body += part
                if len(body) > largest:
                    raise FetchRefused("too large")
            page = decompress(bytes(body), response.headers.get("content-encoding", ""), largest=largest)
            return response.status_code, None, page.decode(charset, errors="replace")

    async def _check(self, client: Any, url: str) -> None:
        """Raise FetchRefused if a URL must not be fetched."""
        parts = urlsplit(url)
        if not self.policy.allow_private:
            await check_public(str(parts.hostname))
        if self.policy.robots:
            root = f"{parts.scheme}://{parts.netloc}"
            if root not in self._robots:
                self._robots[root] = asyncio.create_task(self._rules(client, root))
            rules = await self._robots[root]
            if rules is not None and not rules.can_fetch(AGENT, url):
                raise FetchRefused("robots.txt")

    async def _rules(self, client: Any, root: str) -> RobotFileParser | None:
        try:
            status, _, body = await self._once(client, f"{root}/robots.txt")
        except Exception:  # unreadable rules count as no rules
            return None
        if status >= 300:
            return None
        rules = RobotFileParser()
        rules.parse(body.splitlines())
        return rules


def absolute_url(url: str, *, base: str = "") -> str:
    """Return the absolute URL, relative to `base`; raise FetchRefused if it is not a valid web URL."""
    import httpx

    try:
        whole = str(httpx.URL(urlsplit(urljoin(base, url)).geturl()))  # neither parser alone rejects all
        parts = urlsplit(whole)
        host, port = (parts.hostname or "").encode("idna"), parts.port  # both raise if invalid
    except (ValueError, httpx.InvalidURL):
        raise FetchRefused("not a URL") from None
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise FetchRefused("not http")
    return whole


async def check_public(host: str) -> None:
    """Raise TemporaryFetchError if a host has no address or a private one."""
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise TemporaryFetchError(UNKNOWN_HOST) from None
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    if not all(address.is_global for address in addresses):
        raise TemporaryFetchError(PRIVATE)


def charset_of(named: str | None) -> str:
    """Return the charset of a page, UTF-8 if it names none; raise FetchRefused for unusual ones."""
    try:
        known = codecs.lookup(named or "utf-8").name
    except (LookupError, ValueError):
        return "utf-8"
    if known not in CHARSETS:
        raise FetchRefused(f"charset {named}")
    return known


def decompress(body: bytes, encoding: str, *, largest: int) -> bytes:
    """Decompress one content encoding up to the size limit; raise FetchRefused for any other encoding.

    Nested encodings are not supported: a few bytes could expand to gigabytes before the limit applies.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in WINDOW_BITS:
        raise FetchRefused(f"encoding {encoding[:40]}")
    bits = WINDOW_BITS[encoding]
    if encoding == "deflate" and not is_zlib(body):
        bits = -zlib.MAX_WBITS  # some servers omit the header
    try:
        page = zlib.decompressobj(bits).decompress(body, largest + 1)
    except zlib.error:
        raise TemporaryFetchError(f"damaged {encoding}") from None
    if len(page) > largest:
        raise FetchRefused("too large")
    return page


def is_zlib(body: bytes) -> bool:
    """Return whether this starts with an RFC 1950 header: method 8, and divisible by 31."""
    return len(body) >= 2 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0


def main_text(html: str) -> str:
    """Return a page's text without menus, footers and blank lines."""
    import trafilatura

    text = trafilatura.extract(html, include_comments=False, favor_recall=True) or ""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())
