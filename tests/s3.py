"""An S3 server on loopback, and a proxy before it that behaves as a busy bucket does."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'
_ANSWERS = {
    "slow down": (503, _ERROR.format("SlowDown", "Please reduce your request rate.")),
    "no such upload": (404, _ERROR.format("NoSuchUpload", "The upload may have been aborted or completed.")),
}

Fault = Literal["slow down", "late", "reply lost", "no such upload"]
ChooseFault = Callable[[str, str], Fault | None]
"""Returns the fault of a request by its method and path."""


@contextlib.contextmanager
def s3_server(**variables: str) -> Iterator[dict[str, str]]:
    """Start an S3 server, and yield the environment variables with which a client finds it.

    Args:
        variables: for the environment of the server.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **variables},
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "not-a-key",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def each_nth(number: int) -> ChooseFault:
    """Return a function that chooses a fault for one of `number` requests, of each kind in turn."""
    faults: list[Fault] = ["slow down", "reply lost", "late"]
    requests = itertools.count(1)

    def choose(*_: str) -> Fault | None:
        request = next(requests)
        return None if request % number else faults[request // number % 3]

    return choose


class BusyBucket:
    """A proxy on 127.0.0.1 before a server, until `close`.

    "slow down" and "no such upload" answer an error without passing the request on; "late" passes it on after 0.3 s;
    "reply lost" passes it on, and closes the connection instead of passing the reply back.

    Attributes:
        url: its address.
        choose: chooses the fault of each request from its method and path.
        done: how many requests had each fault.
    """

    def __init__(self, url: str, choose: ChooseFault = lambda *_: None) -> None:
        self.choose, self.done = choose, Counter[str]()
        self._lock = threading.Lock()
        proxy, server = self, url.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with proxy._lock:
                    fault = proxy.choose(self.command, self.path)
                    proxy.done[str(fault)] += 1
                if fault in _ANSWERS:
                    status, text = _ANSWERS[fault]
                    self._answer(status, {"Content-Type": "application/xml"}, text.encode())
                    return
                if fault == "late":
                    time.sleep(0.3)
                connection = http.client.HTTPConnection(server, timeout=60)
                # The body is here already.
                sent = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
                connection.request(self.command, self.path, body, sent)
                reply = connection.getresponse()
                content, headers = reply.read(), dict(reply.getheaders())
                connection.close()
                if fault == "reply lost":
                    self.close_connection = True
                    return
                self._answer(reply.status, headers, content)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

            def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                # The reply to HEAD names the length of what it leaves out.
                length = headers.get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
