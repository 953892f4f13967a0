"""Found on PYTHONPATH by every interpreter that a Ray of the tests starts; its workers become forks of a warm process.

See zygote.py. Without one, or where a worker asks for more than variables of its environment, this does nothing.
"""

from __future__ import annotations

import os
import sys

_WORKER = os.path.join("ray", "_private", "workers", "setup_worker.py")
_DIRECT = os.path.join("ray", "_private", "workers", "default_worker.py")

if "HEADWAY_TESTS_ZYGOTE" in os.environ and len(sys.orig_argv) > 1 and sys.orig_argv[1].endswith((_WORKER, _DIRECT)):
    import ctypes
    import json
    import signal
    import socket

    # This process ends with its raylet, and the worker with this process.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as _socket:
        try:
            _socket.connect(os.environ["HEADWAY_TESTS_ZYGOTE"])
        except OSError:
            _answer = b""
        else:
            _text = json.dumps([sys.orig_argv[1:], dict(os.environ), os.getcwd()]).encode()
            socket.send_fds(_socket, [len(_text).to_bytes(4, "big")], [0, 1, 2])
            _socket.sendall(_text)
            _answer = _socket.recv(1)
            # Until the worker is gone. It is gone when this process is.
            while _answer and _socket.recv(1):
                pass
    if _answer:
        os._exit(0)
    # What setup_worker.py starts in its place is to start as it would for users, too.
    del os.environ["HEADWAY_TESTS_ZYGOTE"]
