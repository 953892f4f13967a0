"""Makes the workers of the tests' Ray forks of a warm process; imported by each interpreter through PYTHONPATH.

See zygote.py. Does nothing without one, or if a worker needs more than environment variables.
"""

from __future__ import annotations

import os
import sys

_WORKER = os.path.join("ray", "_private", "workers", "setup_worker.py")
_DIRECT = os.path.join("ray", "_private", "workers", "default_worker.py")

if os.environ.get("HEADWAY_TESTS_ZYGOTE") and len(sys.orig_argv) > 1 and sys.orig_argv[1].endswith((_WORKER, _DIRECT)):
    import contextlib
    import ctypes
    import json
    import signal
    import socket

    # This process ends with its raylet, and the worker with this process.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as _socket:
        _answer = b""
        with contextlib.suppress(OSError):
            _socket.connect(os.environ["HEADWAY_TESTS_ZYGOTE"])
            _text = json.dumps([sys.orig_argv[1:], dict(os.environ), os.getcwd()]).encode()
            socket.send_fds(_socket, [len(_text).to_bytes(4, "big")], [0, 1, 2])
            _socket.sendall(_text)
            _answer = _socket.recv(1)
            # Wait for the worker, which ends when this process does.
            while _answer and _socket.recv(1):
                pass
    if _answer:
        os._exit(0)
    # The process that setup_worker.py starts instead must start as it does for users.
    del os.environ["HEADWAY_TESTS_ZYGOTE"]
