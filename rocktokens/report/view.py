"""`rocktokens view`: reports on this machine's own address, a list of the runs in a folder, and two of them compared.

The server listens on 127.0.0.1 and nowhere else. It hands out reports and figures of the runs it found, by name, and
no other file: no path of a request is ever joined to a path of the disk before it was found in a fixed list of names.
A request that names another host is refused, so that no page of another site can read a run through the reader's
browser.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from rocktokens.errors import ConfigError, RockTokensError, RunError
from rocktokens.facts import Facts, understood
from rocktokens.report.build import REPORT, report
from rocktokens.report.live import live_data, live_page
from rocktokens.report.page import own_policy, served_style
from rocktokens.report.pages import PAGE_STYLE, TABLES_SCRIPT, compare_page, index_page, message_page, of_another
from rocktokens.report.policy import DATA_POLICY, FIGURE_POLICY, UNFRAMED, page_policy
from rocktokens.report.rollouts import rollouts_page
from rocktokens.report.viewer_tokens import Decode
from rocktokens.run import MANIFEST, Run, open_run

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8707
Decoder = Callable[[Run], "Decode | None"]
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".csv": "text/csv; charset=utf-8",
}
# Sent with every answer, whatever it is.
HEADERS = (
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Permissions-Policy", "camera=(), geolocation=(), microphone=()"),
    ("Cache-Control", "no-store"),
)


def find_runs(path: Path) -> dict[str, Path]:
    """Runs by name: the folder itself if it is a run, else the runs directly in it; links that lead out are skipped."""
    root = path.resolve()
    if not root.is_dir():
        raise RunError(f"{path} is no directory; say `rocktokens view RUN` or `rocktokens view FOLDER`")
    if (root / MANIFEST).is_file():
        return {root.name: root}
    found = {}
    for item in sorted(root.iterdir()):
        if (item / MANIFEST).is_file() and item.resolve().is_relative_to(root) and _can_be_opened(item):
            found[item.name] = item.resolve()
    return found


def _can_be_opened(path: Path) -> bool:
    """Whether a run's manifest can be read; one that cannot must not hide the other runs of a folder."""
    try:
        open_run(path)
    except RockTokensError as error:
        log.warning("left out: %s", error)
        return False
    return True


def inside(run: Path, *parts: str) -> Path | None:
    """A report or a figure of a run as a file that lies, links followed, inside the run; None for anything else."""
    known = parts == (REPORT,) or (len(parts) == 2 and parts[0] == "figures")
    if not known or not all(_plain(part) for part in parts):
        return None
    path = run.joinpath(*parts)
    try:
        is_own = path.suffix in KINDS and path.is_file() and path.resolve().is_relative_to(run.resolve())
    except OSError:  # a name longer than the file system takes, or a directory that may not be read
        return None
    return path if is_own else None


def _plain(name: str) -> bool:
    """A file's own name: no separators, no dots in front, nothing unprintable."""
    return bool(name) and name.isprintable() and not name.startswith(".") and not set(name) & set("/\\:\0")


class Viewer(ThreadingHTTPServer):
    """A server of some runs."""

    daemon_threads = True
    address_family = socket.AF_INET

    def __init__(self, path: Path, port: int = DEFAULT_PORT, decoder: Decoder | None = None) -> None:
        self.folder = path
        self.decoder = decoder
        self._decoders: dict[Path, Decode | None] = {}
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

    def decode(self, path: Path) -> Decode | None:
        """What spells a run's tokens, loaded once and beside the answers; None until then, and where there is none."""
        if path not in self._decoders:
            self._decoders[path] = None
            if self.decoder is not None:
                threading.Thread(target=self._load, args=(path, self.decoder), daemon=True).start()
        return self._decoders[path]

    def _load(self, path: Path, decoder: Decoder) -> None:
        try:
            self._decoders[path] = decoder(open_run(path))
        except RockTokensError as error:
            log.info("tokens of %s are shown as detection named them: %s", path.name, error)


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
            with understood(self.server.folder):
                self._route(urlsplit(self.path))
        except RockTokensError as error:
            self._page(HTTPStatus.INTERNAL_SERVER_ERROR, message_page("That did not work", str(error)))
        except OSError as error:  # the reader went away, or a file did
            log.debug("no answer to %s: %s", self.path, error)
            self.close_connection = True

    do_HEAD = do_GET

    def _route(self, url: Any) -> None:
        runs = self.server.runs()
        parts = [unquote(part) for part in url.path.split("/")[1:]]
        if parts == [""]:
            self._home(runs)
        elif parts == ["compare"]:
            self._compare(runs, parse_qs(url.query))
        elif len(parts) >= 3 and parts[0] == "run" and parts[1] in runs:
            made = {"live": self._live, "live.json": self._live_data, "rollouts": self._rollouts}
            if len(parts) == 3 and parts[2] in made:
                made[parts[2]](runs[parts[1]], parse_qs(url.query))
            else:
                self._file(runs[parts[1]], parts[2:])
        else:
            self._missing()

    def _home(self, runs: dict[str, Path]) -> None:
        if self.server.single:
            name, path = next(iter(runs.items()))
            there = f"/run/{quote(name)}/{REPORT if inside(path, REPORT) else 'live'}"
            self._send(HTTPStatus.FOUND, b"", KINDS[".html"], DATA_POLICY, [("Location", there)])
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

    def _live(self, path: Path, query: dict[str, list[str]]) -> None:
        html, script = live_page(path.name)
        policy = page_policy(script, served_style(), connect=True)
        self._send(HTTPStatus.OK, html.encode(), KINDS[".html"], policy)

    def _live_data(self, path: Path, query: dict[str, list[str]]) -> None:
        body = json.dumps(live_data(path, self.server.decode(path)), allow_nan=False).encode()
        self._send(HTTPStatus.OK, body, "application/json", DATA_POLICY)

    def _rollouts(self, path: Path, query: dict[str, list[str]]) -> None:
        asked = query.get("page", ["1"])[0]
        page = int(asked) - 1 if asked.isdecimal() and len(asked) < 9 else 0
        made = rollouts_page(Facts.of(path), page, self.server.decode(path))
        if made is None:
            words = "This run has no scored rollouts to read yet."
            self._page(HTTPStatus.NOT_FOUND, message_page("No rollouts", words))
            return
        self._send(HTTPStatus.OK, made[0].encode(), KINDS[".html"], page_policy(made[1], served_style()))

    def _file(self, run: Path, parts: list[str]) -> None:
        path = inside(run, *parts)
        if path is None:
            self._missing()
            return
        if path.name == REPORT:
            # The file is the run's: whatever stands in it, only scripts that this version writes are run.
            body = of_another(path.read_bytes(), run)
            self._send(HTTPStatus.OK, body, KINDS[".html"], f"{own_policy()}; {UNFRAMED}")
        else:
            self._send(HTTPStatus.OK, path.read_bytes(), KINDS[path.suffix], FIGURE_POLICY)

    def _missing(self) -> None:
        self._page(HTTPStatus.NOT_FOUND, message_page("Nothing here", "There is no such run, report or figure."))

    def _page(self, status: HTTPStatus, html: str) -> None:
        self._send(status, html.encode(), KINDS[".html"], page_policy(TABLES_SCRIPT, PAGE_STYLE))

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str, policy: str, more: list[tuple[str, str]] | None = None
    ) -> None:
        self.send_response(status)
        own = [("Content-Type", kind), ("Content-Length", str(len(body))), ("Content-Security-Policy", policy)]
        for name, value in (*own, *(more or ())):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def end_headers(self) -> None:
        """Close the head of an answer, with what every answer says."""
        for name, value in HEADERS:
            self.send_header(name, value)
        super().end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request for a page: another method, or no HTTP at all."""
        self.close_connection = True
        self._page(
            HTTPStatus(code), message_page("Not possible", "This server answers requests to read its own pages.")
        )

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line each."""
        log.debug(format, *args)


def view(
    path: str | Path,
    *,
    port: int = DEFAULT_PORT,
    open_browser: bool = False,
    decoder: Decoder | None = None,
    ready: Callable[[Viewer], None] | None = None,
) -> None:
    """Serve until stopped.

    A single run that is no longer training and has no report gets one first. `decoder` finds what spells a run's
    tokens; `ready` is told when the server listens.
    """
    path = Path(path)
    runs = find_runs(path)
    if not runs:
        raise RunError(f"{path} holds no run; make one with `rocktokens study`")
    if (path / MANIFEST).is_file() and not (path / REPORT).exists() and _rests(path):
        report(path, decode=None if decoder is None else decoder(open_run(path)))
    try:
        server = Viewer(path, port, decoder)
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


def _rests(path: Path) -> bool:
    """Whether there is something to report: training has ended, or the run has rollouts."""
    run = open_run(path)
    return run.done("distill") or run.has("rollouts") or run.has("types")
