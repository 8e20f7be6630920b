"""What objects say of themselves: a line of text, never long; a table and a small picture in a notebook.

brief     any value in a few characters
units     sizes and times for people
tables    rows as text and as HTML
pictures  bars as SVG

Knows nothing of what it shows, and loads no torch.
"""

from shared_hooks.showing.brief import MOST, brief, short, summary_of
from shared_hooks.showing.pictures import Bar, bars, strip
from shared_hooks.showing.tables import folded, html_table, panel, text_table
from shared_hooks.showing.units import duration, size

__all__ = [
    "MOST",
    "Bar",
    "bars",
    "brief",
    "duration",
    "folded",
    "html_table",
    "panel",
    "short",
    "size",
    "strip",
    "summary_of",
    "text_table",
]
