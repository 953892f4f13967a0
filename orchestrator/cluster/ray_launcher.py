"""A cluster launcher file as Ray reads it: with its defaults, its own checks, and the autoscaler that it starts."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .ray_env import log_errors_only

_V2 = "RAY_enable_autoscaler_v2"
UP_V2 = "RAY_UP_enable_autoscaler_v2"
"""Variable by which `ray up` selects the autoscaler's version: "1", the default, for version 2."""


def schema_faults(config: Mapping[str, Any], *, is_prepared: bool) -> Iterator[str]:
    """Yield the violations of Ray's schema.

    The file of the schema is no public part of Ray. Without it there are none: Ray's own checks remain, in `prepare`.

    Args:
        config: the file, or what `prepare` returned.
        is_prepared: whether Ray's defaults are in it; without them, what Ray adds or removes itself is no violation.
    """
    import jsonschema
    import ray.autoscaler

    try:
        schema = json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())
    except (OSError, ValueError):
        return
    if not is_prepared:
        removed = {"min_workers", *(name for name in ("head_node", "worker_nodes") if not config.get(name))}
        config = {"cluster_name": "default", **config}
        config = {name: value for name, value in config.items() if name not in removed}
    for error in sorted(jsonschema.Draft7Validator(schema).iter_errors(config), key=lambda error: list(error.path)):
        where = ".".join(str(part) for part in error.path)
        yield f"{where}: {error.message}" if where else error.message


def prepare(config: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the file with Ray's defaults, and why Ray refuses it, if it does. Contacts no cloud.

    Ray has no public function for this. Without its private ones, the file is returned as it is, and is checked only
    against the schema.

    Args:
        config: a file without violations of the schema.
    """
    try:
        from ray.autoscaler._private.util import prepare_config, validate_config
    except ImportError:
        return {"cluster_name": "default", **config}, None
    prepared = dict(config)
    try:
        with _silent():
            prepared = prepare_config(copy.deepcopy(dict(config)))
            problem = next(schema_faults(prepared, is_prepared=True), None)
            if problem is None:
                validate_config(prepared)
    except (ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        return prepared, f"Ray refuses it: {lines[0] if lines else type(error).__name__}"
    except Exception as error:
        # Ray reads fields without checking that they are there.
        return prepared, f"Ray cannot read it: {type(error).__name__}: {error}"
    return prepared, problem


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hide what Ray prints and logs about the defaults that it fills in."""
    with (
        log_errors_only("ray.autoscaler._private.util"),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield


def autoscaler_version(config: Mapping[str, Any]) -> int:
    """Return the version of Ray's autoscaler, 1 or 2, that `ray up` would start from this shell for a file."""
    commands = " ".join(map(str, config.get("head_start_ray_commands") or ()))
    # `ray up` exports the variable before each command, which may set it again.
    if set_there := re.findall(rf"\b{_V2}=[\"']?(\w*)", commands):
        return 2 if set_there[-1].lower() in ("1", "true") else 1
    return 2 if os.environ.get(UP_V2, "1") == "1" else 1
