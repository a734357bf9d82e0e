"""`rocktokens view`: reports on this machine's own address, a list of the runs in a folder, and two of them compared.

The server listens on 127.0.0.1 and nowhere else. It hands out reports and figures of the runs it found, by name, and
no other file: no path of a request is ever joined to a path of the disk before it was found in a fixed list of names.
A request that names another host is refused, so that no page of another site can read a run through the reader's
browser.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from rocktokens.errors import ConfigError, RockTokensError, RunError
from rocktokens.report.build import REPORT, report
from rocktokens.report.run_facts import Facts
from rocktokens.report.server.pages import compare_page, index_page, message_page
from rocktokens.runs.store import MANIFEST

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8707
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".csv": "text/csv; charset=utf-8",
}
# Pages made here hold no script at all; a report brings its own, stricter policy along and may run what that allows.
PLAIN_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'self'"
FIGURE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"


def find_runs(path: Path) -> dict[str, Path]:
    """Runs by name: the folder itself if it is a run, else the runs directly in it; links that lead out are skipped."""
    root = path.resolve()
    if not root.is_dir():
        raise RunError(f"{path} is no directory; say `rocktokens view RUN` or `rocktokens view FOLDER`")
    if (root / MANIFEST).is_file():
        return {root.name: root}
    found = {}
    for item in sorted(root.iterdir()):
        if (item / MANIFEST).is_file() and item.resolve().is_relative_to(root):
            found[item.name] = item.resolve()
    return found


def inside(run: Path, *parts: str) -> Path | None:
    """A report or a figure of a run as a file that lies, links followed, inside the run; None for anything else."""
    known = parts == (REPORT,) or (len(parts) == 2 and parts[0] == "figures")
    if not known or not all(_plain(part) for part in parts):
        return None
    path = run.joinpath(*parts)
    if path.suffix not in KINDS or not path.is_file() or not path.resolve().is_relative_to(run.resolve()):
        return None
    return path


def _plain(name: str) -> bool:
    """A file's own name: no separators, no dots in front, nothing unprintable."""
    return bool(name) and name.isprintable() and not name.startswith(".") and not set(name) & set("/\\:\0")


class Viewer(ThreadingHTTPServer):
    """A server of some runs."""

    daemon_threads = True
    address_family = socket.AF_INET

    def __init__(self, path: Path, port: int = DEFAULT_PORT) -> None:
        self.folder = path
        self.single = (path / MANIFEST).is_file()
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def url(self) -> str:
        """Where to point a browser."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def hosts(self) -> set[str]:
        """Names under which this server answers."""
        names = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}
        return names | ({LOOPBACK, "localhost"} if self.server_port == 80 else set())

    def runs(self) -> dict[str, Path]:
        """Runs that are there now."""
        return find_runs(self.folder)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the pages and files of runs; everything else is refused."""

    server: Viewer
    server_version = "rocktokens"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Answer a request."""
        if self.headers.get("Host") not in self.server.hosts():
            self._page(HTTPStatus.FORBIDDEN, message_page("Not here", "This server answers on 127.0.0.1 only."))
            return
        try:
            self._route(urlsplit(self.path))
        except RockTokensError as error:
            self._page(HTTPStatus.INTERNAL_SERVER_ERROR, message_page("That did not work", str(error)))

    do_HEAD = do_GET

    def _route(self, url: Any) -> None:
        runs = self.server.runs()
        parts = [unquote(part) for part in url.path.split("/")[1:]]
        if parts == [""]:
            self._home(runs)
        elif parts == ["compare"]:
            self._compare(runs, parse_qs(url.query))
        elif len(parts) >= 3 and parts[0] == "run" and parts[1] in runs:
            self._file(runs[parts[1]], parts[2:])
        else:
            self._missing()

    def _home(self, runs: dict[str, Path]) -> None:
        if self.server.single:
            self.send_response(HTTPStatus.FOUND)
            from urllib.parse import quote

            self.send_header("Location", f"/run/{quote(next(iter(runs)))}/{REPORT}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        found = {name: Facts.of(path) for name, path in runs.items()}
        have = {name: inside(path, REPORT) is not None for name, path in runs.items()}
        self._page(HTTPStatus.OK, index_page(self.server.folder.resolve().name, found, have))

    def _compare(self, runs: dict[str, Path], query: dict[str, list[str]]) -> None:
        names = [query.get(key, [""])[0] for key in ("a", "b")]
        if not all(name in runs for name in names):
            self._missing()
            return
        self._page(HTTPStatus.OK, compare_page(*(Facts.of(runs[name]) for name in names)))

    def _file(self, run: Path, parts: list[str]) -> None:
        path = inside(run, *parts)
        if path is None:
            self._missing()
            return
        if path.name == REPORT:
            self._send(HTTPStatus.OK, path.read_bytes(), KINDS[".html"], None)
        else:
            self._send(HTTPStatus.OK, path.read_bytes(), KINDS[path.suffix], FIGURE_POLICY)

    def _missing(self) -> None:
        self._page(HTTPStatus.NOT_FOUND, message_page("Nothing here", "There is no such run, report or figure."))

    def _page(self, status: HTTPStatus, html: str) -> None:
        self._send(status, html.encode(), KINDS[".html"], PLAIN_POLICY)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, policy: str | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        if policy is not None:
            self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line each."""
        log.debug(format, *args)


def view(
    path: str | Path,
    *,
    port: int = DEFAULT_PORT,
    open_browser: bool = False,
    ready: Callable[[Viewer], None] | None = None,
) -> None:
    """Serve until stopped. A single run without a report gets one first; `ready` is told when the server listens."""
    path = Path(path)
    runs = find_runs(path)
    if not runs:
        raise RunError(f"{path} holds no run; make one with `rocktokens study`")
    if (path / MANIFEST).is_file() and not (path / REPORT).exists():
        report(path, images=False)
    try:
        server = Viewer(path, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {LOOPBACK}:{port}: {error.strerror}; choose another --port") from error
    with server:
        print(f"{server.url} shows {', '.join(runs)}; Ctrl-C ends it", flush=True)
        if ready is not None:
            ready(server)
        if open_browser:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("stopped")
