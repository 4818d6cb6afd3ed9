"""Fetching pages politely: each once, few at a time from a host, as its robots.txt allows.

Only http and https, never private addresses unless allowed, no page that is too large, too slow or not text.
Every page is cached as it arrives, so an interrupted run goes on where it stopped; a failure that may pass is
not cached, so a later run tries that page again.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.robotparser import RobotFileParser

from groupwise.errors import ConfigError

AGENT = "groupwise-index"
REDIRECTS = 5
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""How zlib is told of each content encoding."""
CHARSETS = {
    *("utf-8", "utf-16", "utf-16-le", "utf-16-be", "ascii", "koi8-r", "koi8-u", "mac-roman", "mac-cyrillic"),
    *("gb2312", "gbk", "gb18030", "big5", "big5hkscs", "euc_jp", "iso2022_jp", "shift_jis", "cp932"),
    *("euc_kr", "cp949", "cp866", "cp874", "tis-620"),
    *(f"cp125{number}" for number in range(9)),
    *(f"iso8859-{number}" for number in range(1, 17) if number != 12),  # there is no part 12
}
"""Those of the web, by Python's names. Of Python's other codecs some take quadratic time."""


REASONS = 5
"""Reasons that are named where no page could be fetched."""
UNKNOWN_HOST, PRIVATE = "unknown host", "private address"


class FetchRefused(Exception):
    """Why a page was not fetched, in a few words."""


class FetchRefusedToday(FetchRefused):
    """A reason that may be gone tomorrow, or under other settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    """How to behave."""

    together: int = 16
    """Requests under way at once, and at one host."""
    per_host: int = 2
    pause: float = 0.2
    """Seconds between two requests to a host, of each that is under way there."""
    timeout: float = 20.0
    """Seconds without a byte after which a request has failed."""
    page_seconds: float = 120.0
    """Seconds that one request may take in all."""
    largest: int = 5_000_000
    """Bytes of a page, as it arrives and unpacked."""
    retries: int = 3
    back_off: float = 1.0
    """Seconds before the first retry; each one more waits twice as long."""
    allow_private: bool = False
    robots: bool = True


@dataclass(slots=True)
class PageCache:
    """One JSON file a page, named after its URL: {url, text} or {url, problem}."""

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
    """What came of fetching: texts by URL, and why the others have none."""

    texts: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse to go on without any page, and say why there is none."""
        if self.texts:
            return
        if not self.problems:
            raise ConfigError(
                "there is nothing to fetch: no row with an answer has a `url` or `document_url`"
            )
        reasons = Counter(self.problems.values()).most_common()
        hint = "; --allow-private fetches from private addresses too" if PRIVATE in dict(reasons) else ""
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
    manners: FetchPolicy,
    *,
    skip_existing: bool = True,
    on_page: Callable[[int, int], None] = lambda done, total: None,
) -> FetchResult:
    """Fetch each different URL once and return the main text of each page."""
    try:
        import httpx  # noqa: F401
        import trafilatura  # noqa: F401
    except ImportError:
        raise ConfigError("fetching pages needs an extra: pip install 'groupwise[retrieval]'") from None
    return asyncio.run(Fetcher(cache, manners).fetch(list(dict.fromkeys(urls)), skip_existing, on_page))


class Fetcher:
    """One run of fetching."""

    def __init__(self, cache: PageCache, manners: FetchPolicy) -> None:
        self.cache, self.manners = cache, manners
        self._hosts: dict[str, asyncio.Semaphore] = {}
        self._robots: dict[str, asyncio.Task[RobotFileParser | None]] = {}

    async def fetch(
        self, urls: list[str], skip_existing: bool, on_page: Callable[[int, int], None]
    ) -> FetchResult:
        import httpx

        harvest, done = FetchResult(), 0
        gate = asyncio.Semaphore(self.manners.together)
        headers = {"User-Agent": AGENT, "Accept-Encoding": "gzip, deflate"}
        async with httpx.AsyncClient(timeout=self.manners.timeout, headers=headers) as client:

            async def one(url: str) -> None:
                nonlocal done
                page = self.cache.get(url) if skip_existing else None
                if page is None:
                    async with gate:
                        page = await self._page(client, url)
                if "text" in page:
                    harvest.texts[url] = page["text"]
                else:
                    harvest.problems[url] = page["problem"]
                done += 1
                on_page(done, len(urls))

            await asyncio.gather(*map(one, urls))
        return harvest

    async def _page(self, client: Any, url: str) -> dict[str, str]:
        """Return a page's text, or the problem with it, and cache what will be the same another day."""
        try:
            text = await asyncio.to_thread(main_text, await self._html(client, url))
        except FetchRefusedToday as reason:
            return {"problem": str(reason)}
        except FetchRefused as reason:
            page = {"problem": str(reason)}
        except Exception as error:  # whatever else a page brings about, it must not cost the others
            return {"problem": type(error).__name__}
        else:
            page = {"text": text} if text else {"problem": "no main text"}
        self.cache.put(url, **page)
        return page

    async def _html(self, client: Any, url: str) -> str:
        """Follow redirects ourselves: each address is checked before it is asked."""
        url = web_address(url)
        for _ in range(REDIRECTS + 1):
            await self._check(client, url)
            status, location, body = await self._patiently(client, url)
            if location is None:
                if status >= 300:
                    raise FetchRefused(f"status {status}")
                return body
            url = web_address(location, seen_from=url)
        raise FetchRefused("too many redirects")

    async def _patiently(self, client: Any, url: str) -> tuple[int, str | None, str]:
        import httpx

        host = self._hosts.setdefault(urlsplit(url).netloc, asyncio.Semaphore(self.manners.per_host))
        for attempt in range(self.manners.retries + 1):
            if attempt:
                await asyncio.sleep(self.manners.back_off * 2 ** (attempt - 1))
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
                    await asyncio.sleep(self.manners.pause)
        raise FetchRefusedToday(problem)

    async def _once(self, client: Any, url: str) -> tuple[int, str | None, str]:
        """Make one request; a host that sends a byte now and then is not waited for without end."""
        try:
            async with asyncio.timeout(self.manners.page_seconds):
                return await self._request(client, url)
        except TimeoutError:
            raise FetchRefusedToday(f"took longer than {self.manners.page_seconds:g} s") from None

    async def _request(self, client: Any, url: str) -> tuple[int, str | None, str]:
        largest = self.manners.largest
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
            page = unpacked(bytes(body), response.headers.get("content-encoding", ""), largest=largest)
            return response.status_code, None, page.decode(charset, errors="replace")

    async def _check(self, client: Any, url: str) -> None:
        """Refuse what must not be fetched."""
        parts = urlsplit(url)
        if not self.manners.allow_private:
            await check_public(str(parts.hostname))
        if self.manners.robots:
            root = f"{parts.scheme}://{parts.netloc}"
            if root not in self._robots:
                self._robots[root] = asyncio.create_task(self._rules(client, root))
            rules = await self._robots[root]
            if rules is not None and not rules.can_fetch(AGENT, url):
                raise FetchRefused("robots.txt")

    async def _rules(self, client: Any, root: str) -> RobotFileParser | None:
        try:
            status, _, body = await self._once(client, f"{root}/robots.txt")
        except Exception:  # a host without rules that can be read has none
            return None
        if status >= 300:
            return None
        rules = RobotFileParser()
        rules.parse(body.splitlines())
        return rules


def web_address(url: str, *, seen_from: str = "") -> str:
    """Return a URL in full, `seen_from` the page that leads there; refuse one that cannot be asked for."""
    import httpx

    try:
        whole = str(httpx.URL(urlsplit(urljoin(seen_from, url)).geturl()))  # neither refuses all alone
        parts = urlsplit(whole)
        host, port = (parts.hostname or "").encode("idna"), parts.port  # both raise when there is no such
    except (ValueError, httpx.InvalidURL):
        raise FetchRefused("not a URL") from None
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise FetchRefused("not http")
    return whole


async def check_public(host: str) -> None:
    """Refuse a host that has no address, or one that is not of the open internet."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise FetchRefusedToday(UNKNOWN_HOST) from None
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    if not all(address.is_global for address in addresses):
        raise FetchRefusedToday(PRIVATE)


def charset_of(named: str | None) -> str:
    """Return the charset of a page: the one it names, UTF-8 where that is none; refuse what no page has."""
    try:
        known = codecs.lookup(named or "utf-8").name
    except (LookupError, ValueError):
        return "utf-8"
    if known not in CHARSETS:
        raise FetchRefused(f"charset {named}")
    return known


def unpacked(body: bytes, encoding: str, *, largest: int) -> bytes:
    """Undo one content encoding, and stop where the page gets too large; refuse any other encoding.

    Nested encodings make gigabytes of a few bytes before a limit on the outermost one can tell.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in WINDOW_BITS:
        raise FetchRefused(f"encoding {encoding[:40]}")
    bits = WINDOW_BITS[encoding]
    if encoding == "deflate" and not is_zlib(body):
        bits = -zlib.MAX_WBITS  # some servers leave the header out
    try:
        page = zlib.decompressobj(bits).decompress(body, largest + 1)
    except zlib.error:
        raise FetchRefusedToday(f"damaged {encoding}") from None
    if len(page) > largest:
        raise FetchRefused("too large")
    return page


def is_zlib(body: bytes) -> bool:
    """Tell whether this begins as RFC 1950 says: method 8, and a header that 31 divides."""
    return len(body) >= 2 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0


def main_text(html: str) -> str:
    """Return a page's text without menus and footers; blank lines are collapsed."""
    import trafilatura

    text = trafilatura.extract(html, include_comments=False, favor_recall=True) or ""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())
