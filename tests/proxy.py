"""A TCP proxy for tests of faults: half-open connections, replies that never come."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit

from vla_platform.stack.ports import LOOPBACK


class Proxy:
    """Between clients and the server of `url`; `self.url` is the same through the proxy."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.port is not None
        self._target = (LOOPBACK, parts.port)
        self._listener = socket.create_server((LOOPBACK, 0), backlog=256)
        port = self._listener.getsockname()[1]
        netloc = parts.netloc.replace(f":{parts.port}", f":{port}")
        self.url = urlunsplit(parts._replace(netloc=netloc))
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._swallow: bytes | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> int:
        """All connections of now become half open: nobody hears anything, nobody is told."""
        with self._lock:
            frozen, self._links = self._links, []
        for link in frozen:
            link.frozen.set()
        return len(frozen)

    def swallow_reply_to(self, marker: bytes) -> None:
        """The next request with `marker` arrives; its connection is cut before the reply."""
        self._swallow = marker

    @property
    def has_swallowed(self) -> bool:
        return self._swallow is None

    def close(self) -> None:
        self._listener.close()
        self.freeze()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target, 5)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                with self._lock:
                    self._links.append(_Link(self, client, server))

    def takes(self, data: bytes) -> bool:
        """Whether this is the request whose reply nobody shall hear."""
        with self._lock:
            if self._swallow is None or self._swallow not in data:
                return False
            self._swallow = None
            return True


class _Link:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.frozen = threading.Event()
        self._proxy = proxy
        self._ends = (client, server)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, server = self._ends
        back = threading.Thread(target=self._pump, args=(server, client, False), daemon=True)
        back.start()
        self._pump(client, server, True)
        back.join()
        for end in self._ends:
            end.close()  # not before: the number of a closed socket is soon another's

    def _pump(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.frozen.is_set():
                    continue  # taken and lost
                if is_request and self._proxy.takes(data):
                    sink.sendall(data)
                    break
                sink.sendall(data)
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
