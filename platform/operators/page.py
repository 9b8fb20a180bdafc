"""The operators' page: what the ledger says, for people. Read-only, behind one login.

    python -m vla_platform.operators.page

It listens on loopback; put TLS in front of it, or name VLA_TLS_CERT and VLA_TLS_KEY.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import jinja2
import redis
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from vla_platform.control.explanation import explain
from vla_platform.control.ledger import Ledger
from vla_platform.errors import ConfigurationError, NotFoundError
from vla_platform.operators.snapshot import STATES, take
from vla_platform.settings import load_settings
from vla_storage.errors import CodedError

REFRESH_S = 3
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_Next = Callable[[Request], Awaitable[Response]]


class Login(BaseHTTPMiddleware):
    """HTTP basic authentication for everything but the health check."""

    def __init__(self, app: Any, *, user: str, password: str) -> None:
        super().__init__(app)
        self._expected = f"{user}:{password}".encode()

    async def dispatch(self, request: Request, call_next: _Next) -> Response:
        if request.url.path != "/healthcheck" and not self._is_known(request):
            return PlainTextResponse(
                "log in", 401, {"WWW-Authenticate": 'Basic realm="vla operators"', **_HEADERS}
            )
        answer = await call_next(request)
        answer.headers.update(_HEADERS)
        return answer

    def _is_known(self, request: Request) -> bool:
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        try:
            given = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            return False
        return scheme.lower() == "basic" and secrets.compare_digest(given, self._expected)


def create_page(ledger: Ledger, *, user: str, password: str) -> Starlette:
    """The application, on a ledger that the caller closes."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["ago"] = _ago
    folder = resources.files("vla_platform.operators")
    templates = {
        name: environment.from_string(folder.joinpath(f"{name}.html.j2").read_text())
        for name in ("page", "workload")
    }

    async def overview(request: Request) -> Response:
        state = request.query_params.get("state", "running")
        page = request.query_params.get("page", "1")
        if state not in STATES or not page.isdecimal() or len(page) > 9:
            return PlainTextResponse("no such page", 404)
        found = await run_in_threadpool(take, ledger, state=state, page=int(page))
        return HTMLResponse(
            templates["page"].render(now=found, states=STATES, refresh_s=REFRESH_S, at=_clock())
        )

    async def workload(request: Request) -> Response:
        run = request.path_params["run"]
        try:
            fields = await run_in_threadpool(ledger.workload, run)
            told = await run_in_threadpool(explain, ledger, run)
        except NotFoundError:
            return PlainTextResponse("no such workload", 404)
        shown = templates["workload"].render(
            run=run, fields=sorted(fields.items()), told=told, refresh_s=REFRESH_S, at=_clock()
        )
        return HTMLResponse(shown)

    async def health(request: Request) -> Response:
        await run_in_threadpool(ledger.client.ping)
        return PlainTextResponse("ok")

    async def refused(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"the ledger does not answer: {error}", 503)

    async def coded(request: Request, error: Exception) -> Response:
        assert isinstance(error, CodedError)
        return JSONResponse(error.to_dict(), 503 if error.retryable else 500)

    return Starlette(
        routes=[
            Route("/", overview, methods=["GET"]),
            Route("/workloads/{run}", workload, methods=["GET"]),
            Route("/healthcheck", health, methods=["GET"]),
        ],
        middleware=[Middleware(Login, user=user, password=password)],
        exception_handlers={redis.RedisError: refused, CodedError: coded},
    )


def _clock() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _ago(seconds: float) -> str:
    passed = max(0.0, time.time() - seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= size:
            return f"{passed / size:.0f} {unit}"
    return f"{passed:.0f} s"


def main() -> None:
    settings = load_settings()
    if not settings.page_password:
        raise ConfigurationError("the operators' page needs a password: set VLA_PAGE_PASSWORD")
    ledger = Ledger.connect(settings.redis_url)
    page = create_page(ledger, user=settings.page_user, password=settings.page_password)
    uvicorn.run(
        page,
        host=settings.host,
        port=settings.port or 8088,
        log_level="warning",
        server_header=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


if __name__ == "__main__":
    main()
