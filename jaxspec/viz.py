"""Pictures of results for notebooks: plain HTML, no library. (`jaxspec.results` shows itself by it, so it imports nothing.)"""

from __future__ import annotations

import html
from typing import Any

DRAFTED = "background:#c9f2d4;color:#123;border-radius:3px"
BONUS = "background:#fde7b0;color:#123;border-radius:3px"
PREFILL = "background:#dde3ea;color:#123;border-radius:3px"


def token_spans(result: Any) -> str:
    """A `GenerationResult`'s tokens as coloured spans: accepted drafts apart from tokens that the target alone chose."""
    pieces = result.pieces or [f"{t} " for t in result.tokens]
    spans = []
    for i, (piece, drafted) in enumerate(zip(pieces, result.from_draft, strict=True)):
        style = DRAFTED if drafted else PREFILL if i == 0 else BONUS
        text = html.escape(piece).replace("\n", "↵<br>")
        spans.append(f'<span style="{style}" title="token {result.tokens[i]}">{text}</span>')
    return "".join(spans)


def depth_bars(stats: Any) -> str:
    """Acceptance by depth of `Stats` as bars."""
    rows = []
    for depth, share in enumerate(stats.accept_by_depth, start=1):
        bar = f'<div style="background:#6fbf86;height:0.8em;width:{share * 12:.2f}em"></div>'
        cells = f'<td style="text-align:right">{depth}</td><td style="text-align:left">{bar}</td><td>{share:.0%}</td>'
        rows.append(f"<tr>{cells}</tr>")
    return f"<table><tr><th>depth</th><th>accepted</th><th></th></tr>{''.join(rows)}</table>" if rows else ""


def result_html(result: Any) -> str:
    """What a notebook shows for a `GenerationResult`."""
    legend = (
        f'<span style="{DRAFTED}">accepted draft</span> <span style="{BONUS}">bonus token</span> '
        f'<span style="{PREFILL}">from prefill</span>'
    )
    return (
        f'<div style="line-height:1.9;white-space:pre-wrap">{token_spans(result)}</div>'
        f'<p style="margin:0.4em 0">{legend}</p>{depth_bars(result.stats)}'
        f'<pre style="margin:0.4em 0">{html.escape(str(result.stats))}</pre>'
    )
