"""Content-Security-Policies: what a page may run, load and send. Scripts and stylesheets are named by their hash.

Text of a tokenizer, a prompt or a run can therefore neither run nor leave a page, whatever it is. Plotly needs one
thing more: it adds an empty style element, which has a hash too, and fills it through the document's own interface.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'"
# What only a header can say, a page's own element cannot: nobody may show the page inside theirs.
UNFRAMED = "frame-ancestors 'none'"
# A figure is a picture from a run: no script in it runs. An SVG is styled inline, so only that is let in.
FIGURE_POLICY = f"{NOTHING}; style-src 'unsafe-inline'; {UNFRAMED}; sandbox"
DATA_POLICY = f"{NOTHING}; {UNFRAMED}; sandbox"


def content_hash(text: str) -> str:
    """How a policy names an inline script or stylesheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def report_policy(scripts: Sequence[str], style: str) -> str:
    """A report: these scripts and this stylesheet, pictures of its own; nothing is fetched, framed or sent."""
    return (
        f"{NOTHING}; script-src {' '.join(map(content_hash, scripts))}; "
        f"style-src {content_hash(style)} {content_hash('')}; img-src data: blob:"
    )


def page_policy(script: str, style: str, *, connect: bool = False) -> str:
    """A page that `view` makes: its one script and stylesheet; where it refreshes itself it may ask this server."""
    own = f"script-src {content_hash(script)}; style-src {content_hash(style)}; img-src data:; {UNFRAMED}"
    form = NOTHING.replace("form-action 'none'", "form-action 'self'")
    return f"{form}; {own}" + ("; connect-src 'self'" if connect else "")
