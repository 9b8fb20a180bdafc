"""A trace per training job, through every process that works on it (OpenTelemetry, optional).

A job's trace id is a function of its id, and so is the id of its root span: whoever works on the
job adds spans to the same trace without having been told of it, also after a crash or a lost
message. The context travels in Celery's headers as well, as W3C `traceparent`, and becomes a link
to whoever sent the hint. Work on a run before its first job has a trace of the run's own.

`VLA_TRACES` says where spans go: `http(s)://host:4318`, an OTLP collector, or a folder, in which
each process writes `<role>.jsonl`. Without it everything here does nothing, and nothing of
OpenTelemetry is imported.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from vla_platform.errors import ConfigurationError

HEADER = "traceparent"
Attributes = Mapping[str, str | int | float | bool]

_log = logging.getLogger(__name__)
_tracing: _Tracing | None = None


def trace_id(subject: str) -> int:
    """128 bits, of a job's or a run's id."""
    return int.from_bytes(hashlib.sha256(f"vla-trace {subject}".encode()).digest()[:16], "big")


def root_span_id(subject: str) -> int:
    """64 bits: the span that all others of the trace are below."""
    return int.from_bytes(hashlib.sha256(f"vla-span {subject}".encode()).digest()[:8], "big")


def start(target: str, *, process: str) -> None:
    """Begin to trace in this process. Raises `ConfigurationError` where the `otel` extra lacks."""
    global _tracing
    stop()
    if target:
        _tracing = _Tracing(target, process)


def stop() -> None:
    """Send what waits, and trace no more."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.close()


def is_on() -> bool:
    return _tracing is not None


@contextmanager
def span(name: str, subject: str, **attributes: str | int | float | bool) -> Iterator[None]:
    """Time a part of the work on `subject`, a job or a run. What it raises is noted."""
    if _tracing is None:
        yield
        return
    with _tracing.span(name, subject, attributes):
        yield


def past(
    name: str, subject: str, begun_s: float, ended_s: float, **attributes: str | int | float | bool
) -> None:
    """A part that is over; seconds since the epoch."""
    if _tracing is not None:
        _tracing.past(name, subject, begun_s, ended_s, attributes)


def root(
    subject: str, begun_s: float, ended_s: float, **attributes: str | int | float | bool
) -> None:
    """The whole of a job or a run, once it is over."""
    if _tracing is not None:
        _tracing.root(subject, begun_s, ended_s, attributes)


def headers() -> dict[str, str]:
    """What a message carries of the work that sends it."""
    return {} if _tracing is None else _tracing.headers()


@contextmanager
def caused_by(traceparent: str | None) -> Iterator[None]:
    """Spans begun within link to whoever sent the message."""
    if _tracing is None or not traceparent:
        yield
        return
    token = _tracing.remember_cause(traceparent)
    try:
        yield
    finally:
        _tracing.cause.reset(token)


@dataclass(frozen=True)
class _Fixed:
    """Ids for the next span that has no parent."""

    trace_id: int
    span_id: int


class _Tracing:
    """The parts of OpenTelemetry that are used, imported once tracing is asked for."""

    def __init__(self, target: str, process: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigurationError(
                f"VLA_TRACES is set, but OpenTelemetry is not installed ({error}): "
                "pip install 'vla-platform[otel]'"
            ) from error
        fixed: ContextVar[_Fixed | None] = ContextVar("vla_fixed_span", default=None)

        class Ids(RandomIdGenerator):
            def generate_trace_id(self) -> int:
                found = fixed.get()
                return super().generate_trace_id() if found is None else found.trace_id

            def generate_span_id(self) -> int:
                found = fixed.get()
                return super().generate_span_id() if found is None else found.span_id

        self._api: Any = trace
        self._propagator: Any = TraceContextTextMapPropagator()
        self._fixed = fixed
        self.cause: ContextVar[Any] = ContextVar("vla_trace_cause", default=None)
        self._file: IO[str] | None = None
        self._provider = TracerProvider(
            resource=Resource.create(
                {"service.name": "vla-platform", "service.instance.id": process}
            ),
            id_generator=Ids(),
            shutdown_on_exit=True,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter(target, process), schedule_delay_millis=1000)
        )
        self._tracer = self._provider.get_tracer("vla_platform")

    def close(self) -> None:
        self._provider.shutdown()
        if self._file is not None:
            self._file.close()

    def _exporter(self, target: str, process: str) -> Any:
        if target.startswith(("http://", "https://")):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter(endpoint=f"{target.rstrip('/')}/v1/traces")
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        folder = Path(target)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{process or 'process'}.jsonl").open("a", encoding="utf-8")
        return ConsoleSpanExporter(
            out=self._file, formatter=lambda one: one.to_json(indent=None) + "\n"
        )

    @contextmanager
    def span(self, name: str, subject: str, attributes: Attributes) -> Iterator[None]:
        with self._tracer.start_as_current_span(
            name, context=self._parent(subject), attributes=dict(attributes), links=self._links()
        ):
            yield

    def past(
        self, name: str, subject: str, begun_s: float, ended_s: float, attributes: Attributes
    ) -> None:
        made = self._tracer.start_span(
            name, context=self._parent(subject), attributes=dict(attributes),
            start_time=_ns(begun_s), links=self._links(),
        )  # fmt: skip
        made.end(end_time=_ns(max(begun_s, ended_s)))

    def root(self, subject: str, begun_s: float, ended_s: float, attributes: Attributes) -> None:
        from opentelemetry.context import Context

        token = self._fixed.set(_Fixed(trace_id(subject), root_span_id(subject)))
        try:
            made = self._tracer.start_span(
                "job", context=Context(), attributes={"job": subject, **attributes},
                start_time=_ns(begun_s),
            )  # fmt: skip
        finally:
            self._fixed.reset(token)
        made.end(end_time=_ns(max(begun_s, ended_s)))

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier

    def remember_cause(self, traceparent: str) -> Token[Any]:
        found = self._propagator.extract({HEADER: traceparent})
        context = self._api.get_current_span(found).get_span_context()
        return self.cause.set(context if context.is_valid else None)

    def _parent(self, subject: str) -> Any:
        """The span of this thread where it belongs to the same trace, else the trace's root."""
        wanted = trace_id(subject)
        if self._api.get_current_span().get_span_context().trace_id == wanted:
            return None
        above = self._api.SpanContext(
            trace_id=wanted, span_id=root_span_id(subject), is_remote=True,
            trace_flags=self._api.TraceFlags(self._api.TraceFlags.SAMPLED),
        )  # fmt: skip
        return self._api.set_span_in_context(self._api.NonRecordingSpan(above))

    def _links(self) -> list[Any]:
        cause = self.cause.get()
        return [] if cause is None else [self._api.Link(cause)]


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
