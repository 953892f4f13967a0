"""Secrets are recognized by name and in URLs, and nothing else is changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from headway.trainer import TrainerConfig
from headway.trainer.config import as_plain
from headway.trainer.redaction import is_secret_name, redact, redact_command, redact_urls, secret_paths


@pytest.mark.parametrize(
    "name", ["password", "db_passwd", "api_key", "apiKey", "config.hub.hf_token", "token", "aws_secret_access_key",
             "access-key-id", "credentials", "headers[0].auth_token"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["num_tokens", "max_tokens", "tokenizer", "tokenizer_path", "pad_token", "eos_token", "loss_per_token",
             "key", "keys", "monkey", "author", "token_ids", "config.learning_rate"],
)  # fmt: skip
def test_names_of_other_settings(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("s3://key:hunter2@bucket/a", "s3://(redacted)@bucket/a"),
        ("at postgres://me:hun@ter2@db:5432/x, failed", "at postgres://(redacted)@db:5432/x, failed"),
        ("https://ghp_0123456789abcdefghij@github.com/a", "https://(redacted)@github.com/a"),
        ("https://a/b?X-Amz-Signature=hunter2&list=1", "https://a/b?X-Amz-Signature=(redacted)&list=1"),
        ("sftp://me@host/a and s3://bucket/a@b:c", "sftp://me@host/a and s3://bucket/a@b:c"),
        ("http://127.0.0.1:8265", "http://127.0.0.1:8265"),
    ],
)
def test_passwords_in_urls(text: str, redacted: str) -> None:
    assert redact_urls(text) == redacted


def test_text_with_settings() -> None:
    text = "config.api_key=hunter2 is invalid: {'password': 'hunter2', 'lr': '1'}; hf_token='hunter2', num_tokens=5"
    assert "hunter2" not in redact(text)
    assert redact(text).endswith("hf_token=(redacted), num_tokens=5")
    assert redact({"command": ["a=1", "token=hunter2"], "step": 3}) == {
        "command": ["a=1", "token=(redacted)"],
        "step": 3,
    }
    assert redact("config.token=None") == "config.token=None"


def test_command_lines() -> None:
    words = [
        "fit",
        "config.api_key=a b",
        "--token",
        "hunter2",
        "--password=x",
        "config.pin=7",
        "config.lr=1",
        "--verbose",
    ]
    assert redact_command(words, ["config.pin"]) == [
        "fit", "config.api_key=(redacted)", "--token", "(redacted)", "--password=(redacted)", "config.pin=(redacted)",
        "config.lr=1", "--verbose",
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    hf_token: str | None = None
    mirror: str = ""


@dataclass(frozen=True, kw_only=True)
class SecretConfig(TrainerConfig):
    api_key: str = ""
    pin: int = field(default=0, metadata={"secret": True})
    hub: HubConfig = HubConfig()
    headers: dict[str, Any] = field(default_factory=dict)
    secret_size: int = 3


def test_configs_in_files() -> None:
    config = SecretConfig(
        api_key="hunter2", pin=7, headers={"token": "hunter2", "accept": "text"},
        hub=HubConfig(mirror="https://me:hunter2@mirror"),
    )  # fmt: skip
    plain = as_plain(config)
    assert "hunter2" not in str(plain)
    assert (plain["api_key"], plain["pin"], plain["secret_size"]) == ("(redacted)", "(redacted)", 3)
    assert plain["hub"] == {"hf_token": None, "mirror": "https://(redacted)@mirror"}
    assert plain["headers"] == {"token": "(redacted)", "accept": "text"}
    assert set(secret_paths(config, "config")) == {"config.pin", "config.api_key"}
