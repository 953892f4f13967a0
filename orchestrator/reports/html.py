"""Builds a self-contained HTML page: style, tables, and escaped text. Independent of runs."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem clamp(0.9rem, 3vw, 2.5rem) 4rem; background: #fff;
  color: #1b1f24; font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 0.3rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 0.7rem; padding-bottom: 0.25rem; border-bottom: 1px solid #d8dee4; }
h3 { font-size: 1rem; margin: 0 0 0.2rem; }
p { margin: 0.4rem 0; }
.note { color: #57606a; font-size: 0.9rem; }
.status { display: inline-block; padding: 0.05rem 0.6rem; border-radius: 1rem; font-size: 0.9rem; font-weight: 600;
  vertical-align: 0.25rem; margin-left: 0.4rem; background: #eaeef2; }
.status.completed, .status.stopped { background: #dafbe1; color: #116329; }
.status.failed { background: #ffebe9; color: #a40e26; }
.status.running { background: #ddf4ff; color: #0550ae; }
.status.interrupted, .status.time_limit { background: #fff8c5; color: #7d4e00; }
.error { background: #fff5f4; border-left: 4px solid #cf222e; padding: 0.5rem 0.8rem; white-space: pre-wrap; }
.figures { display: grid; gap: 0.8rem 1.6rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); }
.figure { min-width: 0; margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: #57606a; }
th, td { padding: 0.22rem 1.1rem 0.22rem 0; vertical-align: top; border-bottom: 1px solid #eef1f4; }
.grid th, .grid td { white-space: nowrap; overflow-wrap: normal; }
.grid td.text { white-space: normal; min-width: 16rem; }
.facts th { white-space: nowrap; width: 1%; }
td.number, th.number { text-align: right; }
tr.best td { background: #f1fbf3; font-weight: 600; }
pre { margin: 0.4rem 0; padding: 0.7rem 0.9rem; background: #f6f8fa; border-radius: 6px; font-size: 0.82rem;
  line-height: 1.4; overflow-x: auto; overflow-wrap: normal; }
summary { cursor: pointer; color: #0550ae; }
@media (max-width: 40rem) { .facts, .facts tbody, .facts tr, .facts th, .facts td { display: block; width: auto; }
  .facts th { border: 0; padding-bottom: 0; } }
@media print { body { max-width: none; } .figure { break-inside: avoid; } }
"""


class Html(str):
    """Text that is already markup and must not be escaped."""

    __slots__ = ()


def escaped(value: Any) -> Html:
    """Return a value as escaped text; markup is returned unchanged."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def joined(parts: Iterable[Html]) -> Html:
    """Concatenate parts of a page."""
    return Html("\n".join(parts))


def element(tag: str, content: Any, **attributes: str) -> Html:
    """Return `<tag>content</tag>`; write attributes that are Python keywords with an underscore: `class_`."""
    given = "".join(f' {name.rstrip("_")}="{html.escape(value)}"' for name, value in attributes.items() if value)
    return Html(f"<{tag}{given}>{escaped(content)}</{tag}>")


def section(title: str, *parts: Html) -> Html:
    """Return a heading and its non-empty parts; empty text if all are empty."""
    there = [part for part in parts if part]
    return Html(f"<section>\n{element('h2', title)}\n{joined(there)}\n</section>") if there else Html("")


def note(text: Any) -> Html:
    """Return a paragraph in small grey text."""
    return element("p", text, class_="note")


def facts(pairs: Mapping[str, Any]) -> Html:
    """Return a table with two columns, without the rows whose value is None or empty."""
    rows = [
        f"<tr>{element('th', name, scope='row')}{element('td', value)}</tr>"
        for name, value in pairs.items()
        if value not in (None, "")
    ]
    return Html(f'<table class="facts"><tbody>\n{joined(map(Html, rows))}\n</tbody></table>') if rows else Html("")


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    numbers: Iterable[str] = (),
    texts: Iterable[str] = (),
    best: int | None = None,
) -> Html:
    """Return a table that scrolls sideways if it is too wide.

    Args:
        headings: headings of the columns.
        rows: cells of each row.
        numbers: headings of the columns to align right.
        texts: headings of the columns whose text wraps.
        best: index of the row to highlight.
    """
    kinds = ["number" if each in set(numbers) else "text" if each in set(texts) else "" for each in headings]
    head = "".join(element("th", each, scope="col", class_=kind) for each, kind in zip(headings, kinds, strict=True))
    body = [
        element(
            "tr",
            Html("".join(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))),
            class_="best" if index == best else "",
        )
        for index, row in enumerate(rows)
    ]
    if not body:
        return Html("")
    return Html(
        f'<div class="wide"><table class="grid"><thead><tr>{head}</tr></thead><tbody>\n{joined(body)}\n'
        "</tbody></table></div>"
    )


def details(summary: str, content: Html) -> Html:
    """Return content that is shown when the summary is clicked."""
    return Html(f"<details>{element('summary', summary)}\n{content}\n</details>")


def page(title: str, body: Html, *, library: str = "", last: str = "") -> str:
    """Return the whole file. Its content security policy forbids the browser to fetch anything.

    Args:
        title: title of the window.
        body: body of the page.
        library: JavaScript that the figures need.
        last: JavaScript for the end of the page.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
    first, end = (f"<script>{script}</script>\n" if script else "" for script in (library, last))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'{element("title", title)}\n<link rel="icon" href="data:,">\n<style>{_STYLE}</style>\n{first}</head>\n'
        f"<body>\n{body}\n{end}</body>\n</html>\n"
    )
