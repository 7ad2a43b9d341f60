"""A document of headings, paragraphs, tables and figures, as Markdown and as one HTML page that needs nothing else."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { background: var(--soft); }
figure { margin: 1rem 0; } figcaption { opacity: .8; }
figure svg { max-width: 100%; height: auto; }
code { background: var(--soft); padding: 0 .2rem; border-radius: 3px; }
details { margin: 1rem 0; }
"""
INK = "#7f7f7f"  # of a picture's text and lines where it can't take the page's colour: seen on light and on dark


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Table:
    """``bold`` are places (row, column) from 0."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Figure:
    """``svg`` has the word currentColor where the page's colour belongs. ``name`` is a file's name, without its end."""

    name: str
    caption: str
    svg: str


Block = Heading | Paragraph | Table | Figure


def write_document(folder: Path, name: str, title: str, blocks: Sequence[Block]) -> list[Path]:
    """NAME.html, NAME.md, and for the latter figures/NAME-FIGURE.svg. Gives the two files. Raises OSError."""
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for block in blocks:
        if isinstance(block, Figure):
            (figures / f"{name}-{block.name}.svg").write_text(block.svg.replace("currentColor", INK))
    page, text = folder / f"{name}.html", folder / f"{name}.md"
    page.write_text(to_html(title, blocks), encoding="utf-8")
    text.write_text(to_markdown(name, title, blocks), encoding="utf-8")
    return [page, text]


def to_markdown(name: str, title: str, blocks: Sequence[Block]) -> str:
    parts = [f"# {title}"]
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"## {text}")
            case Paragraph(text):
                parts.append(text)
            case Table(header, rows, bold):
                lines = [_markdown_row(header), "|---" * len(header) + "|"]
                for i, row in enumerate(rows):
                    lines.append(_markdown_row([f"**{x}**" if (i, j) in bold else x for j, x in enumerate(row)]))
                parts.append("\n".join(lines))
            case Figure(figure, caption, _):
                parts.append(f"![{caption}](figures/{name}-{figure}.svg)")
    return "\n\n".join(parts) + "\n"


def _markdown_row(entries: Sequence[str]) -> str:
    return "| " + " | ".join(entry.replace("|", "\\|") for entry in entries) + " |"


def to_html(title: str, blocks: Sequence[Block]) -> str:
    parts = []
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"<h2>{escape(text)}</h2>")
            case Paragraph(text):
                parts.append(f"<p>{_inline(text)}</p>")
            case Table(header, rows, bold):
                head = "".join(f"<th>{_inline(entry)}</th>" for entry in header)
                body = "".join(
                    "<tr>"
                    + "".join(f"<td>{_html_cell(entry, (i, j) in bold)}</td>" for j, entry in enumerate(row))
                    + "</tr>"
                    for i, row in enumerate(rows)
                )
                parts.append(f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>')
            case Figure(_, caption, svg):
                picture = svg[svg.index("<svg") :]
                parts.append(f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>")
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _html_cell(text: str, bold: bool) -> str:
    return f"<b>{_inline(text)}</b>" if bold else _inline(text)


def _inline(text: str) -> str:
    """Text with `code` in it."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
