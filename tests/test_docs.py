"""Every snippet of the README and of docs/ runs, page by page, in reading order.

The blocks of a page share one folder, and its Python blocks one namespace. The folder has `examples/` in it, as the
root of the repository has. A Python block with a title (```python title="digits.py") is also saved under that name. A
block that cannot run is marked no-run (```python no-run) and has a comment before it: `<!-- not run: reason -->`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_RUN = {
    "make train": "takes minutes; its parts have tests of their own",
    "make test": "would run this test again",
    "make check": "CI runs it beside the tests",
    "make bench": "takes minutes",
}
"""Shell lines, as they stand in the pages, that are not run here, and why."""

PYTHON, SHELL = {"python"}, {"bash", "console"}
OTHER = {"", "text", "yaml", "json", "toml", "mermaid", "diff", "html"}

# The closing fence is indented like the opening one: blocks may be inside lists and tabs.
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```\s*$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, with the code that it runs."""

    page: str
    line: int
    language: str
    code: str
    title: str | None = None


def blocks_of(text: str, page: str) -> list[Block]:
    """Return the code to run of a page."""
    blocks = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        language, info, code = match["language"], match["info"], textwrap.dedent(match["code"])
        if language not in PYTHON | SHELL | OTHER:
            raise AssertionError(f"{page}:{line - 1}: {language!r} is no language that runs, nor one that does not")
        if language in OTHER:
            continue
        if "no-run" in info.split():
            before = text[: match.start()].rstrip().rsplit("\n", 1)[-1]
            if not re.search(r"<!-- not run: \S.* -->", before):
                raise AssertionError(
                    f"{page}:{line - 1}: a block that is not run needs <!-- not run: reason --> before it"
                )
            continue
        title = re.search(r'title="([^"]+)"', info)
        if language in SHELL:
            code = "\n".join(commands_of(code))
        if code.strip():
            blocks.append(Block(page, line, language, code, title[1] if title else None))
    return blocks


def commands_of(code: str) -> list[str]:
    """Return the commands of a shell block: the lines after `$ ` if there are any; the others are output."""
    lines = code.replace("\\\n", "").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.split("#")[0].strip() not in NOT_RUN]


RUNNER = """
def main():
    import json, linecache, os, subprocess, sys

    for block in json.loads(open(sys.argv.pop(1)).read()):
        where = f"{block['page']}:{block['line']}"
        print("---", where, flush=True)
        if block["language"] != "python":
            if subprocess.run(["bash", "-euo", "pipefail", "-c", block["code"]]).returncode:
                sys.exit(f"{where}: these commands failed:\\n{block['code']}")
            continue
        if block["title"]:
            os.makedirs(os.path.dirname(block["title"]) or ".", exist_ok=True)
            open(block["title"], "w").write(block["code"])
        # Padded, so that a traceback has the lines of the page; remembered, so that it shows them.
        code = "\\n" * (block["line"] - 1) + block["code"]
        linecache.cache[where] = (len(code), None, code.splitlines(True), where)
        exec(compile(code, where, "exec"), globals())

if __name__ == "__main__":  # A process that a snippet spawns imports this file.
    main()
"""


def run_page(text: str, page: str, folder: Path, *, timeout_s: float = 280) -> str:
    """Run all blocks of a page in a folder, in a fresh process, and return their output."""
    blocks = blocks_of(text, page)
    if not blocks:
        return ""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / ".blocks.json").write_text(json.dumps([asdict(block) for block in blocks]))
    (folder / ".run.py").write_text(RUNNER)
    binaries = str(Path(sys.executable).parent)
    done = subprocess.run(
        [sys.executable, ".run.py", ".blocks.json"],
        cwd=folder,
        env={**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"a snippet of {page} failed:\n{done.stdout}"
    return done.stdout


@pytest.mark.extended
@pytest.mark.ray
@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_every_snippet_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run_page(page.read_text(), page.relative_to(ROOT).as_posix(), tmp_path)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_docs_lead_somewhere(page: str) -> None:
    """Internal links are checked when the site is built."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_blocks_of_a_page_share_a_folder_and_a_namespace(tmp_path: Path) -> None:
    page = """
```python title="part.py"
x = 20
```
1. In a list:

   ```python
   import part
   y = x + part.x
   open("out.txt", "w").write(str(y + 2))
   ```
```yaml
not: [run
```
<!-- not run: needs a cluster -->
```bash no-run
exit 1
```
```console
$ cat out.txt
42, and whatever follows is output
$ make test   # not again
$ python -c "import part; print('part', part.x)"
$ ls examples/digits.py
```
"""
    printed = run_page(page, "page.md", tmp_path).splitlines()
    assert printed[-2:] == ["42part 20", "examples/digits.py"]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("text\n\n```python\na = 1\nraise ValueError('bad')\n```\n", r'(?s)"page.md:4", line 5, in <module>.*bad'),
        ("```bash\nfalse\necho on\n```\n", "(?s)page.md:2: these commands failed"),
        ("```bash\nfalse | true\n```\n", "(?s)page.md:2: these commands failed"),
        ("```python no-run\n1\n```\n", "page.md:1: a block that is not run needs"),
        ("```Python\n1\n```\n", "'Python' is no language that runs"),
    ],
)
def test_what_fails_is_named_by_page_and_line(page: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        run_page(page, "page.md", tmp_path)
