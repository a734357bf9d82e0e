"""One call of one server: a connection, a request, a whole answer. Who is called is servers.py's business."""

from __future__ import annotations

import http.client
import json
import os
import socket
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rocktokens.errors import ConfigError, RunError

# The environment variable whose value is sent as a bearer token, for servers started with --api-key.
KEY_VARIABLE = "ROCKTOKENS_API_KEY"


class Refused(ConfigError):
    """A 4xx status or a 501: request, key or the server's settings are wrong, and repeating it would not help."""

    def __init__(self, message: str, status: int, said: str) -> None:
        super().__init__(message)
        self.status, self.said = status, said


class Reply(NamedTuple):
    """A whole answer of a server."""

    status: int
    headers: dict[str, str]
    body: bytes
    url: str

    def json(self) -> Any:
        """The body as JSON; a body that is cut off or no JSON is refused, naming the server."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise RunError(f"{self.url} answered with {len(self.body)} bytes that are no JSON: {error}") from error

    def text(self) -> str:
        """What the server said, in one line: its error message where the body holds one."""
        text = self.body.decode("utf-8", "replace")
        try:
            said = json.loads(text)
        except ValueError:
            said = None
        if isinstance(said, dict):
            inner = said.get("error", said.get("detail", said))
            text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
        return " ".join(text.split())[:500]


def connect(url: str, seconds: float) -> http.client.HTTPConnection:
    """A connection that opens with its first request."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    assert parts.hostname is not None
    return kind(parts.hostname, parts.port, timeout=seconds)


def hang_up(link: http.client.HTTPConnection) -> None:
    """Close a connection that another thread may be waiting on; closing alone would not wake it."""
    try:
        if link.sock is not None:
            link.sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side was first
    link.close()


def exchange(
    link: http.client.HTTPConnection, method: str, url: str, path: str, payload: bytes | None, seconds: float
) -> Reply:
    """One request on a connection, and the whole answer."""
    headers = {"Content-Type": "application/json"} if payload is not None else {}
    key = os.environ.get(KEY_VARIABLE)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    link.timeout = seconds
    if link.sock is None:
        link.connect()
    sock = link.sock
    if sock is not None:  # another thread may hang up
        # Long requests are silent for minutes: without this a network in between forgets the connection.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.settimeout(seconds)
    link.request(method, urlsplit(url).path.rstrip("/") + path, body=payload, headers=headers)
    answer = link.getresponse()
    return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read(), url)


def reason_of(error: BaseException) -> str:
    """Why a connection failed, in the system's words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
