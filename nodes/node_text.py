"""Shows a report on a node in the browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..kernels_glue.report import Report, Show

# The frontend draws the text as HTML on its canvas nodes and as Markdown on "Nodes 2.0" nodes.
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", "*": "&#42;", "`": "&#96;", "\\": "&#92;"})


def text_on(node_id: str | None) -> Show:
    """Returns a function that shows a report's text on the node, replacing what stood there.

    Without a running server (a script that imports the node) the function does nothing.
    """

    def show(report: Report) -> None:
        from server import PromptServer

        server = getattr(PromptServer, "instance", None)
        if server is not None and node_id is not None:
            server.send_progress_text(markup(report.text), node_id)

    return show


def markup(text: str) -> str:
    """Returns what both HTML and Markdown display as the lines and characters of a plain text.

    Two spaces at its end keep a line from being joined with the next in Markdown, where a list would also
    take in the lines behind it.
    """
    lines = text.translate(_ESCAPES).split("\n")
    return "  \n".join(f"• {line[2:]}" if line.startswith("- ") else line for line in lines)
