"""Who may look: this machine's own browser, or whoever has the token. Nothing can be changed from outside.

A page of another site cannot read a loopback server by itself, but it can try: by sending requests
with its own Origin, or by making its own name resolve to 127.0.0.1 (DNS rebinding). Both are refused.
"""

from __future__ import annotations

import secrets
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "groupwise_token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def is_loopback(host: str) -> bool:
    """Whether a name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware in front of everything that is served."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self.app = app
        self.token = token
        """None: only for this machine, under its loopback names."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refusal = self.refusal(scope)
        answer = self.app if refusal is None else refusal

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await answer(scope, receive, send_with_headers)

    def refusal(self, scope: Scope) -> Response | None:
        """Return what to answer instead; None where the request may pass."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only reading is possible here", 405)
        if self.token is None and not is_loopback(host_name(host)):
            return PlainTextResponse("this page is for 127.0.0.1 only", 403)
        if foreign(headers, host):
            return PlainTextResponse("requests of other sites are refused", 403)
        return None if self.token is None else self._without_token(scope, headers)

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        assert self.token is not None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if same(given, self.token):
            # From here on a cookie proves it: addresses end up in histories and logs.
            # One slash: a browser takes "//name/" for another site.
            response = RedirectResponse(f"/{scope['path'].lstrip('/')}", 303)
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return response
        if same(cookie(headers), self.token) or same(bearer(headers), self.token):
            return None
        return PlainTextResponse("this page needs the token that `groupwise watch` printed", 401)


def foreign(headers: Headers, host: str) -> bool:
    """Whether another site made the request; following a link to the page itself is fine."""
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return True
    followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return headers.get("sec-fetch-site") in ("cross-site", "same-site") and not followed


def host_name(host: str) -> str:
    """The Host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def bearer(headers: Headers) -> str:
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value if kind.lower() == "bearer" else ""


def same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(), token.encode())
