"""Runs Python programs in separate processes that fork from one which has imported torch and Headway.

For programs that are killed, or watched, where it does not matter that the interpreter is new: an import of torch takes
three seconds of CPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.distributed import forking


class Program:
    """A process that runs source code as `__main__`.

    Args:
        source: the program, as for `python -c`.
        arguments: its `sys.argv[1:]`.
        environment: its environment variables; by default, this process gives its own.
        folder: its current directory, by default that of the repository.
    """

    def __init__(
        self,
        source: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        folder: Path = Path(__file__).parents[1],
    ) -> None:
        self._output = tempfile.TemporaryDirectory(prefix="headway-program-")
        given = dict(os.environ if environment is None else environment)
        asked = (source, arguments, given, str(folder), self._output.name)
        self._process = forking().Process(target=_main, args=asked, daemon=True)
        self._process.start()
        self._written: tuple[str, str] | None = None

    @property
    def returncode(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float = 120.0) -> tuple[str, str]:
        """Wait for the end, and return what the program has written to its standard output and standard error."""
        if self._written is None:
            self._process.join(timeout_s)
            is_late = self._process.exitcode is None
            self._process.kill()
            self._process.join()
            self._written = self.read("out"), self.read("err")
            self._output.cleanup()
            if is_late:
                raise TimeoutError("\n".join((f"the program has not ended after {timeout_s} s:", *self._written)))
        return self._written

    def read(self, stream: str) -> str:
        """Return what the program has written so far, to "out" or "err"."""
        file = Path(self._output.name, stream)
        return file.read_text() if file.exists() else ""


def _main(source: str, arguments: tuple[str, ...], environment: dict[str, str], folder: str, output: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    tempfile.tempdir = None
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(source, "<string>", "exec"), main.__dict__)
