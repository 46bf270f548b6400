"""Shows text on a node in the browser."""

from __future__ import annotations

from collections.abc import Callable


def text_on(node_id: str | None) -> Callable[[str], None]:
    """Returns a function that shows text on the node, replacing what stood there.

    Without a running server (a script that imports the node) the function does nothing.
    """

    def show(text: str) -> None:
        from server import PromptServer

        server = getattr(PromptServer, "instance", None)
        if server is not None and node_id is not None:
            server.send_progress_text(text, node_id)

    return show
