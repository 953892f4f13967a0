"""A cluster that requires a token is recognized before Ray connects."""

from __future__ import annotations

from concurrent import futures
from typing import Any

import grpc
import pytest
import ray

from headway.orchestrator.cluster.token_check import _METHOD, check_token
from headway.trainer.errors import ConfigError
from tests.heads import free_ports, head


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a server that answers as a head of Ray 2.60 does without a token, and one that does not know the method."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    started = []

    def start(code: grpc.StatusCode) -> str:
        def abort(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(code, "Authentication token is missing or incorrect")
            return b""

        _, service, method = _METHOD.split("/")
        handlers = {method: grpc.unary_unary_rpc_method_handler(abort)}
        found = grpc.server(futures.ThreadPoolExecutor(1))
        found.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = found.add_insecure_port("127.0.0.1:0")
        found.start()
        started.append(found)
        return f"127.0.0.1:{port}"

    yield start
    for each in started:
        each.stop(None).wait()


def test_a_missing_token_is_named_at_once(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    address = server(grpc.StatusCode.UNAUTHENTICATED)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"the cluster at {address} requires a token: set RAY_AUTH_MODE=token"):
        check_token()


def test_other_answers_and_no_answer_are_left_to_ray(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (closed,) = free_ports(1)
    for address in (server(grpc.StatusCode.UNIMPLEMENTED), f"127.0.0.1:{closed}", "auto", "ray://127.0.0.1:1", ""):
        monkeypatch.setenv("RAY_ADDRESS", address)
        check_token()
    monkeypatch.setenv("RAY_ADDRESS", server(grpc.StatusCode.UNAUTHENTICATED))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_token()


@pytest.mark.extended
@pytest.mark.ray
def test_the_head_of_the_installed_ray_rejects_the_method_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    (port,) = free_ports(1)
    with head(f"--port={port}"):
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match="requires a token"):
            check_token()
