"""Checks, before Ray connects, that a cluster which requires a token is given one: Ray itself retries for minutes."""

from __future__ import annotations

import os

import ray

from headway.trainer.errors import ConfigError

# Any method of a Ray head; with a missing token it is rejected before its arguments are read.
_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_TIMEOUT_S = 5.0


def check_token() -> None:
    """Check that the cluster of RAY_ADDRESS accepts this process's token, if it requires one.

    Checks nothing if Ray is connected, if this process sends a token, or if the address is not host:port. A head that
    does not answer is left to Ray's own error.

    Raises:
        ConfigError: the cluster requires a token.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if ray.is_initialized() or ":" not in address or "://" in address or os.environ.get("RAY_AUTH_MODE") == "token":
        return
    try:
        import grpc  # type: ignore[import-untyped,unused-ignore]
    except ImportError:  # a Ray without its dashboard has none
        return
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise token_error(address) from error


def token_error(address: str) -> ConfigError:
    """Return the error for a cluster that requires a token."""
    return ConfigError(
        f"the cluster at {address} requires a token: set RAY_AUTH_MODE=token and, if its head is another machine, "
        "RAY_AUTH_TOKEN to the output of `ray get-auth-token` there"
    )
