"""What the build of this documentation adds to MkDocs: docstrings as Griffe reads them, and a link at every name."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe

REFERENCE = Path(__file__).parent / "reference"


class Docstrings(griffe.Extension):
    """Reads `Example:` as `Examples:`, so that `>>>` is code, and `a, b: text` as two items with one text."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes one docstring, before it is parsed."""
        if obj.docstring is not None:
            text = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
            obj.docstring.value = "\n".join(_one_name_each(text.split("\n")))


def _one_name_each(lines: list[str]) -> Iterator[str]:
    lines = list(lines)
    while lines:
        line = lines.pop(0)
        item = re.fullmatch(r"    (\w+(?:, \w+)+): (.*)", line)
        if item is None:
            yield line
            continue
        more = []
        while lines and lines[0].startswith("     "):
            more.append(lines.pop(0))
        for name in item[1].split(", "):
            yield from (f"    {name}: {item[2]}", *more)


@cache
def documented() -> dict[str, str]:
    """The full path of everything that has a place in the reference, by its last name."""
    directives = (re.findall(r"(?m)^::: (\S+)", page.read_text()) for page in sorted(REFERENCE.glob("*.md")))
    return {path.rpartition(".")[2]: path for paths in directives for path in paths}


def on_page_content(content: str, **kwargs: Any) -> str:
    """Links `Name` and `Name.method` in code font, on every page and in every docstring, to the reference."""

    def link(code: re.Match[str]) -> str:
        name, dot, member = html.unescape(code[1]).removesuffix("()").partition(".")
        # A bare `fit` may be any; `Trainer.fit`, `find_run` and `Duration` are plain enough.
        if name not in documented() or (name.islower() and "_" not in name):
            return code[0]
        return f'<autoref identifier="{documented()[name]}{dot}{member}" optional>{code[0]}</autoref>'

    # Headings and what is a link already stay as they are.
    parts = re.split(r"(<h\d.*?</h\d>|<a .*?</a>|<autoref.*?</autoref>|<pre.*?</pre>)", content, flags=re.S)
    return "".join(
        part if index % 2 else re.sub(r"<code>([\w.]+(?:\(\))?)</code>", link, part) for index, part in enumerate(parts)
    )
