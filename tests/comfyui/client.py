"""ComfyUI's HTTP and websocket API: run a graph, and everything that it reports on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import websocket

_TEXT_EVENT = 3  # protocol.BinaryEventTypes.TEXT

# A proxy from the environment must not stand between the test and its own machine.
_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PromptRejected(ValueError):
    """ComfyUI refused a graph. `error` and `node_errors` are what it answered."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.error: dict[str, Any] = dict(answer.get("error") or {})
        self.node_errors: dict[str, Any] = dict(answer.get("node_errors") or {})
        lines = [f"{self.error.get('message')}: {self.error.get('details')}"]
        for node_id, entry in self.node_errors.items():
            for error in entry.get("errors", []):
                lines.append(
                    f"node {node_id} ({entry.get('class_type')}): "
                    f"{error.get('message')}: {error.get('details')}"
                )
        super().__init__("\n".join(lines))


@dataclasses.dataclass(frozen=True)
class NodeError:
    """An exception that a node raised."""

    node_id: str
    exception_type: str
    exception_message: str
    traceback: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What came of a graph.

    outputs: `ui` dicts by node id, from /history. executed: node ids in the order they first
    ran. cached: node ids taken from the cache. errors: empty if the run succeeded. texts: each
    progress text as (node id, text). seconds: wall time from posting to the end.
    """

    prompt_id: str
    outputs: dict[str, dict[str, Any]]
    executed: tuple[str, ...]
    cached: frozenset[str]
    errors: tuple[NodeError, ...]
    texts: tuple[tuple[str, str], ...]
    seconds: float
    interrupted: bool = False

    def raise_for_errors(self) -> RunResult:
        """self if the run succeeded; RuntimeError with the node's message and traceback if not."""
        for error in self.errors:
            raise RuntimeError(
                f"node {error.node_id}: {error.exception_type}: {error.exception_message}\n"
                + "".join(error.traceback)
            )
        if self.interrupted:
            raise RuntimeError("the run was interrupted")
        return self

    def texts_of(self, node_id: str) -> list[str]:
        """The progress texts of one node, oldest first."""
        return [text for node, text in self.texts if node == node_id]


class ComfyClient:
    """A client of the ComfyUI server at 127.0.0.1:port."""

    port: int = 0

    def require_alive(self) -> None:
        """Raise if the server is known to have ended; called while waiting for it."""

    def get(self, path: str) -> Any:
        """The JSON that a GET of `path` answers. Raises urllib.error.HTTPError on an error status."""
        with _http.open(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
            return json.load(response)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST `body` as JSON; the JSON answer, or None if it is empty."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with _http.open(request, timeout=60) as response:
            answer = response.read()
        return json.loads(answer) if answer else None

    def object_info(self, node_id: str) -> dict[str, Any]:
        """ComfyUI's description of a node. Raises KeyError if it knows no such node."""
        return self.get(f"/object_info/{node_id}")[node_id]

    def interrupt(self) -> None:
        """Interrupt the running graph; callable from another thread than run()."""
        self.post("/interrupt")

    def free(self) -> None:
        """Unload all models and drop cached outputs, once the queue is idle."""
        self.post("/free", {"unload_models": True, "free_memory": True})

    def run(self, graph: Mapping[str, Any], timeout: float = 300.0) -> RunResult:
        """Run a graph in API format and wait for its end.

        An exception in a node is reported in RunResult.errors, not raised. Raises PromptRejected if
        the graph does not validate, TimeoutError after `timeout` seconds (the run is interrupted
        then), and what require_alive raises if the server ended.
        """
        import websocket

        self.require_alive()
        client = uuid.uuid4().hex
        url = f"ws://127.0.0.1:{self.port}/ws?clientId={client}"
        with contextlib.closing(websocket.create_connection(url, timeout=1.0)) as socket_:
            started = time.monotonic()
            try:
                answer = self.post("/prompt", {"prompt": graph, "client_id": client})
            except urllib.error.HTTPError as error:
                if error.code != 400:
                    raise
                raise PromptRejected(json.loads(error.read())) from None
            return self._follow(socket_, answer["prompt_id"], started, timeout)

    def _follow(
        self, socket_: websocket.WebSocket, prompt_id: str, started: float, timeout: float
    ) -> RunResult:
        import websocket

        executed: dict[str, None] = {}
        cached: frozenset[str] = frozenset()
        errors: list[NodeError] = []
        texts: list[tuple[str, str]] = []
        interrupted = False
        while True:
            if time.monotonic() - started > timeout:
                self.interrupt()
                raise TimeoutError(f"the graph did not end within {timeout:.0f} s")
            try:
                message = socket_.recv()
            except websocket.WebSocketTimeoutException:
                self.require_alive()
                continue
            except (websocket.WebSocketConnectionClosedException, ConnectionError):
                time.sleep(1.0)  # a dying process closes its sockets before it ends
                self.require_alive()
                raise
            if isinstance(message, bytes):
                if message and struct.unpack_from(">I", message)[0] == _TEXT_EVENT:
                    texts.append(parse_progress_text(message[4:]))
                continue
            if not message:
                continue
            event = json.loads(message)
            data = event.get("data") or {}
            if data.get("prompt_id") != prompt_id:
                continue
            kind = event["type"]
            if kind == "execution_cached":
                cached = frozenset(data["nodes"])
            elif kind == "execution_error":
                errors.append(
                    NodeError(
                        str(data["node_id"]),
                        data["exception_type"],
                        data["exception_message"].rstrip(),
                        tuple(data["traceback"]),
                    )
                )
            elif kind == "execution_interrupted":
                interrupted = True
            elif kind == "executing":
                if data["node"] is None:  # sent after the result is in the history
                    break
                executed.setdefault(data["node"])
        seconds = time.monotonic() - started
        history = self.get(f"/history/{prompt_id}").get(prompt_id, {})
        return RunResult(
            prompt_id=prompt_id,
            outputs=history.get("outputs", {}),
            executed=tuple(executed),
            cached=cached,
            errors=tuple(errors),
            texts=tuple(texts),
            seconds=seconds,
            interrupted=interrupted,
        )


def parse_progress_text(payload: bytes) -> tuple[str, str]:
    """(node id, text) of a TEXT event: big-endian length of the id, the id, the text, in UTF-8."""
    (length,) = struct.unpack_from(">I", payload)
    return payload[4 : 4 + length].decode(), payload[4 + length :].decode()
