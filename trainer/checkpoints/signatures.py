"""Sign checkpoints and verify who signed them, and the chain in which each names the one before it.

A signature covers SHA-256 of the manifest and of all files that it names. The checksums in the manifest alone detect
damage and not tampering.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError
from .format.manifest import MANIFEST, parse_manifest
from .format.strict_json import parse_json
from .scan import ScannedCheckpoint
from .storage import Storage

SIGNATURE = "signature.json"


def sign_checkpoint(storage: Storage, name: str, key: bytes) -> None:
    """Write a signature beside the manifest; an earlier one is replaced.

    Args:
        storage: storage of the checkpoint.
        name: its name there.
        key: a private Ed25519 key, as PEM without a password.

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: the key is not one, or the package cryptography is missing.
    """
    from_pem = _serialization().load_pem_private_key
    try:
        private: Any = from_pem(key, password=None)
        # Only Ed25519 keys sign without further arguments.
        private.sign(b"")
        public = private.public_key().public_bytes_raw()
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the key must be a private Ed25519 key as PEM without a password, as `openssl genpkey -algorithm ed25519` "
            f"makes: {error}"
        ) from error
    files = _digests(storage, name)
    content = {"files": files, "public_key": public.hex(), "signature": private.sign(_message(files)).hex()}
    storage.write(name, SIGNATURE, json.dumps(content, indent=1).encode())


def signature_problem(storage: Storage, name: str, key: bytes) -> str | None:
    """Return why a checkpoint is not what the owner of a key has signed; None if it is. Reads all its files.

    Args:
        storage: storage of the checkpoint.
        name: its name there.
        key: a public Ed25519 key, as PEM.

    Raises:
        ConfigError: the key is not one, or the package cryptography is missing.
    """
    serialization = _serialization()
    from cryptography.exceptions import InvalidSignature

    try:
        public: Any = serialization.load_pem_public_key(key)
        raw = public.public_bytes_raw().hex()
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"the key must be a public Ed25519 key as PEM: {error}") from error
    if not storage.has(name, SIGNATURE):
        return "it is not signed"
    try:
        content = parse_json(storage.read(name, SIGNATURE), SIGNATURE)
        signed, signer, signature = content["files"], content["public_key"], bytes.fromhex(content["signature"])
        message = _message(signed)
    except (CheckpointError, ValueError, KeyError, TypeError) as error:
        return f"{SIGNATURE} cannot be read ({error})"
    if signer != raw:
        return f"it is signed by another key, {str(signer)[:16]}..."
    try:
        public.verify(signature, message)
    except InvalidSignature:
        return "its signature is forged"
    try:
        found = _digests(storage, name)
    except CheckpointError as error:
        return str(error)
    if changed := sorted(file for file in found.keys() | signed.keys() if found.get(file) != signed.get(file)):
        return f"{', '.join(changed)} changed since it was signed"
    return None


def chain_problems(entries: Sequence[ScannedCheckpoint]) -> dict[str, str]:
    """Return, by name, where a checkpoint names another one before it than the one that is there.

    Links to checkpoints that have been deleted are not checked.
    """
    by_name = {entry.name: entry.checkpoint for entry in entries if entry.checkpoint is not None}
    problems = {}
    for name, checkpoint in by_name.items():
        if checkpoint.previous is None:
            continue
        before, digest = checkpoint.previous
        there = by_name.get(before)
        if there is not None and there.digest != digest and there.sequence < checkpoint.sequence:
            problems[name] = f"it names {before} with digest {digest[:16]}..., and that one has {there.digest[:16]}..."
    return problems


def _digests(storage: Storage, name: str) -> dict[str, str]:
    """Return SHA-256 of the manifest and of all files that it names."""
    manifest = storage.read(name, MANIFEST)
    _, files = parse_manifest(storage.path_of(name), manifest)
    digests = {MANIFEST: hashlib.sha256(manifest).hexdigest()}
    with tempfile.TemporaryDirectory(prefix="headway-sign-") as scratch:
        for file in sorted(files):
            with storage.fetch(name, file, Path(scratch)).open("rb") as stream:
                digests[file] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def _message(files: Any) -> bytes:
    return b"headway checkpoint\n" + json.dumps(files, sort_keys=True, separators=(",", ":")).encode()


def _serialization() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise ConfigError("signatures need the package cryptography: pip install 'headway[signing]'") from error
    return serialization
