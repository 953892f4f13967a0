"""Remove secrets from what is written to files and shown: settings by their name, and passwords in URLs.

A name is secret if it contains password, passwd, passphrase, secret, api_key, access_key, private_key or credential, or
if its last word is token: `hf_token`, but not `num_tokens`, `tokenizer` or `pad_token`. Only text is secret by its
name; a dataclass field with `metadata={"secret": True}` is secret whatever its name and type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Any

REDACTED = "(redacted)"

_PARTS = re.compile(r"password|passwd|passphrase|secret|api_?key|access_?key|private_?key|credential")
# Before "token", these make it a symbol of a text or a unit.
_NOT_SECRET = {
    *("pad", "eos", "bos", "unk", "mask", "sep", "cls", "special", "image"),
    *("per", "by", "each", "stop", "start", "end", "first", "last", "next"),
}
# `user:password@`, or one long word: a token.
_USERINFO = re.compile(r"""(?<=://)(?:[^\s/"'<>]*:[^\s/"'<>]*|[^\s/"'<>:@]{20,})(?=@)""")
_SETTING = re.compile(r"""(?<![\w.-])([\w.\[\]-]+)=("[^"]*"|'[^']*'|[^\s"',;)&#]+)""")
_ENTRY = re.compile(r"""(["'])([\w.-]+)\1: ("[^"]*"|'[^']*')""")
_SIGNATURES = ("sig", "signature", "x-amz-signature", "x-goog-signature")


def is_secret_name(name: str) -> bool:
    """Return whether a setting is secret by its name; of a dotted path, the last name counts."""
    last = re.sub(r"\[.*", "", name.rpartition(".")[2])
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", last).lower().strip("_")
    if _PARTS.search(words):
        return True
    *before, end = words.split("_")
    return end == "token" and not _NOT_SECRET.intersection(before)


def is_secret_field(field: Field[Any], value: Any) -> bool:
    """Return whether the value of a dataclass field is to be kept out of files."""
    if value is None or value == "":
        return False
    return bool(field.metadata.get("secret")) or (isinstance(value, str) and is_secret_name(field.name))


def redact_value(name: str, value: Any) -> Any:
    """Return a plain value, redacted if it is text with a secret name; of other text, redact passwords in URLs."""
    if not isinstance(value, str) or not value:
        return value
    return REDACTED if is_secret_name(name) else redact_urls(value)


def redact_urls(text: str) -> str:
    """Return a text without the passwords of its URLs."""
    if "://" not in text:
        return text
    text = _USERINFO.sub(REDACTED, text)
    return re.sub(r"([?&])([\w-]+)=([^&\s\"'#]+)", _query, text)


def redact(value: Any, secrets: Iterable[str] = ()) -> Any:
    """Return a text without passwords in URLs and without the values of settings with secret names.

    Such a setting is written as `name=value` or `"name": "value"`. In lists and dicts, redact each text.

    Args:
        value: anything; other types are returned as they are.
        secrets: further names, or dotted paths, that are secret.
    """
    if isinstance(value, Mapping):
        return {key: redact_value(str(key), redact(each, secrets)) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(each, secrets) for each in value]
    if not isinstance(value, str):
        return value
    names = set(secrets)

    def setting(match: re.Match[str]) -> str:
        is_secret = match[1] in names or is_secret_name(match[1])
        return f"{match[1]}={REDACTED}" if is_secret and match[2] not in ("None", "null") else match[0]

    text = redact_urls(value)
    if "=" in text:
        text = _SETTING.sub(setting, text)
    if ": " in text:
        text = _ENTRY.sub(lambda found: _entry(found, names), text)
    return text


def redact_command(words: Sequence[str], secrets: Iterable[str] = ()) -> list[str]:
    """Return a command line without its secrets: of `name=value`, `--name=value` and `--name value`.

    Args:
        words: the command line.
        secrets: further dotted paths that are secret.
    """
    redacted: list[str] = []
    names = set(secrets)
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        option = words[index - 1].lstrip("-") if index and words[index - 1].startswith("--") else ""
        if equals and value and " " not in name and (name in names or is_secret_name(name.lstrip("-"))):
            redacted.append(f"{name}={REDACTED}")
        elif option and "=" not in option and is_secret_name(option) and not word.startswith("--"):
            redacted.append(REDACTED)
        else:
            redacted.append(redact(word, names))
    return redacted


def secret_paths(settings: Any, path: str = "") -> list[str]:
    """Return the dotted paths of the secret fields of a dataclass that have a value."""
    found: list[str] = []
    for each in fields(settings):
        where, value = f"{path}.{each.name}" if path else each.name, getattr(settings, each.name, None)
        if is_secret_field(each, value):
            found.append(where)
        elif is_dataclass(value) and not isinstance(value, type):
            found += secret_paths(value, where)
    return found


def _query(match: re.Match[str]) -> str:
    is_secret = is_secret_name(match[2]) or match[2].lower() in _SIGNATURES
    return f"{match[1]}{match[2]}={REDACTED}" if is_secret else match[0]


def _entry(match: re.Match[str], names: set[str]) -> str:
    quote, name = match[1], match[2]
    is_secret = (name in names or is_secret_name(name)) and len(match[3]) > 2
    return f"{quote}{name}{quote}: {match[3][0]}{REDACTED}{match[3][0]}" if is_secret else match[0]
