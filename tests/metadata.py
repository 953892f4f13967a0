"""A stand-in for the metadata services of clouds, which answers as their documentation says."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_TOKEN = "a-token"


class MetadataStandIn:
    """Serves `pages` by path on 127.0.0.1 until `close`, to requests with the headers that the cloud wants.

    Attributes:
        url: its address.
        pages: text by path, with the query; a path that is not there is 404.
        token: the token of EC2 that is valid now.
    """

    def __init__(self, cloud: str) -> None:
        self.pages: dict[str, str] = {}
        self.token = _TOKEN
        if cloud == "gcp":
            self.pages = {"/computeMetadata/v1/instance/id": "1", "/computeMetadata/v1/instance/preempted": "FALSE"}
        if cloud == "azure":
            self.pages["/metadata/instance/compute/name?api-version=2021-02-01&format=text"] = "vm-0"
            self.pages["/metadata/scheduledevents?api-version=2020-07-01"] = '{"DocumentIncarnation": 1, "Events": []}'
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                is_token = cloud == "aws" and self.path == "/latest/api/token"
                ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
                self._answer(stand_in.token if is_token and ttl.isdigit() else None)

            def do_GET(self) -> None:
                wanted = {
                    "aws": ("X-aws-ec2-metadata-token", stand_in.token), "gcp": ("Metadata-Flavor", "Google"),
                    "azure": ("Metadata", "true"),
                }  # fmt: skip
                name, value = wanted[cloud]
                if self.headers.get(name) != value:
                    self.send_error(401 if cloud == "aws" else 403 if cloud == "gcp" else 400)
                    return
                self._answer(stand_in.pages.get(self.path))

            def _answer(self, text: str | None) -> None:
                if text is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
