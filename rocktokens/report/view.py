"""`rocktokens view`: reports on this machine's own address, a list of the runs in a folder, and runs while they train.

The server listens on 127.0.0.1 and nowhere else. It hands out reports and figures of the runs it found, by name, and
no other file: no path of a request is ever joined to a path of the disk before it was found in a fixed list of names.
A request that names another host is refused, so that no page of another site can read a run through the reader's
browser.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import socket
import threading
from collections.abc import Callable
from datetime import datetime
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from markupsafe import Markup, escape

from rocktokens.detect.figures import footprint_row
from rocktokens.errors import ConfigError, RockTokensError, RunError
from rocktokens.facts import Facts, understood
from rocktokens.report.conclusions import verdict
from rocktokens.report.live import live_data
from rocktokens.report.page import (
    DATA_POLICY,
    REPORT,
    UNFRAMED,
    as_json,
    own_policy,
    packed,
    page_policy,
    resource,
    templates,
    viewer_values,
)
from rocktokens.report.stage import decoder_of, report
from rocktokens.report.viewer import Decode, payload, rollout_list
from rocktokens.run import MANIFEST, open_run
from rocktokens.show import Column, Table, at_home, interval, percent, text, visible
from rocktokens.values import Row

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8707
PER_PAGE = 50
"""Rollouts on a page of all rollouts."""
KINDS = {".html": "text/html; charset=utf-8", ".csv": "text/csv; charset=utf-8"}
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
        if not (item / MANIFEST).is_file() or not item.resolve().is_relative_to(root):
            continue
        try:
            open_run(item)
            found[item.name] = item.resolve()
        except RockTokensError as error:  # one that cannot be read must not hide the others
            log.warning("left out: %s", error)
    return found


def inside(run: Path, *parts: str) -> Path | None:
    """A report or a figure of a run as a file that lies, links followed, inside the run; None for anything else."""
    if parts != (REPORT,) and not (len(parts) == 2 and parts[0] == "figures" and re.fullmatch(r"\w+\.csv", parts[1])):
        return None
    path = run.joinpath(*parts)
    try:
        return path if path.is_file() and path.resolve().is_relative_to(run.resolve()) else None
    except OSError:  # a name longer than the file system takes, or a directory that may not be read
        return None


# The pages that the server makes itself


@cache
def style() -> str:
    """The stylesheet of these pages: the reader's system decides between light and dark."""
    css = resource("report.css")
    dark = css.split('[data-theme="dark"] {', 1)[1].split("}", 1)[0]
    return f"{css}@media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}"


def served(template: str, script: str, **values: Any) -> tuple[str, str]:
    """(a page, its policy): its one script and stylesheet; only the live page may ask this server for more."""
    code = resource(script)
    values = {"links": (), **values}
    html = templates().get_template(template).render(script=Markup(code), style=Markup(style()), **values)
    more = "; img-src data:; " + UNFRAMED + ("; connect-src 'self'" if script == "live.js" else "")
    return html, page_policy([code], style(), more=more)


def message_page(title: str, text: str) -> tuple[str, str]:
    """One sentence."""
    return served("message.html", "tables.js", title=title, text=text)


def of_another(html: bytes, run: Path) -> bytes:
    """A run's report as it is served: one whose scripts are not this version's says so, since they will not run."""
    if str(escape(own_policy())).encode() in html[:20_000]:
        return html
    command = f"rocktokens report {shlex.quote(at_home(str(run)))} --again"
    said = Markup(
        "<p>This report was not written by this version of rocktokens, so its scripts are not run and its charts stay "
        "empty. <code>{}</code> makes it again.</p>"
    ).format(command)
    return re.sub(rb"(<body[^>]*>)|$", lambda found: found[0] + said.encode(), html, count=1)


def index_page(folder: str, runs: dict[str, Path]) -> tuple[str, str]:
    """The runs of a folder, a row each."""
    shown, failed = [], {}
    for name, path in runs.items():
        try:
            with understood(path):
                shown.append(_listed(name, Facts.of(path)))
        except RockTokensError as error:  # one run that cannot be shown must not hide the others
            failed[name] = str(error)
    columns = [
        Column("run", "link"),
        Column("verdict", "badge"),
        Column("", "title"),
        Column("of loss", "share_loss", percent, interval=True),
        Column("accuracy", "accuracy", text),
        Column("student / teacher", "pair"),
        Column("last change", "changed"),
    ]
    table = Table(columns, shown, name="runs")
    return served("index.html", "tables.js", title=f"Runs in {visible(folder)}", failed=failed, table=table)


def _listed(name: str, facts: Facts) -> Row:
    """What the list shows of a run."""
    found, at = verdict(facts), f"/run/{quote(name)}"
    report = inside(facts.run.path, REPORT) is not None
    links = {REPORT: name, "rollouts": "rollouts", "live": "live"} if report else {"live": name, "rollouts": "rollouts"}
    shown = (Markup('<a href="{}/{}"><bdi>{}</bdi></a>').format(at, to, visible(text)) for to, text in links.items())
    return {
        **(footprint_row(facts) if facts.rocks else {}),
        "link": Markup(" ").join(shown),
        "badge": Markup('<span class="badge {}">{}</span>').format(found.tone, found.label),
        "title": found.title,
        "accuracy": interval(found.accuracies.get("after"), percent),
        "pair": Markup("<bdi>{}</bdi> / <bdi>{}</bdi>").format(*facts.pair),
        "changed": datetime.fromtimestamp((facts.run.path / MANIFEST).stat().st_mtime).strftime("%Y-%m-%d %H:%M"),
    }


def rollouts_page(facts: Facts, page: int, decode: Decode | None) -> tuple[str, str] | None:
    """A page of all rollouts in the report's own viewer; None where there is nothing to show."""
    everything = rollout_list(facts) if facts.columns("rollouts") else []
    last = max(1, -(-len(everything) // PER_PAGE))
    page = min(max(page, 1), last)
    names = [row["rollout_id"] for row in everything[(page - 1) * PER_PAGE : page * PER_PAGE]]
    found = payload(facts, decode, names=names) if names else None
    if found is None:
        return None
    part = "The rollouts in the order of the table; the most probable tokens were kept for those that the report shows"
    return served(
        "rollouts.html",
        "viewer.js",
        title=f"Rollouts of {visible(facts.name)}",
        links=((REPORT, "Report"), ("live", "Live"), ("/", "Runs")),
        total=len(everything),
        first=(page - 1) * PER_PAGE + 1,
        last=(page - 1) * PER_PAGE + len(names),
        page=page,
        places=sorted({1, max(1, page - 1), page, min(last, page + 1), last}),
        viewer_packed=Markup(packed(as_json(found))),
        **viewer_values(found, part),
    )


# The server


class Viewer(ThreadingHTTPServer):
    """A server of some runs."""

    daemon_threads = True
    address_family = socket.AF_INET

    def __init__(self, path: Path, port: int = DEFAULT_PORT) -> None:
        self.folder = path
        self._decoders: dict[Path, Decode | None] = {}
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def url(self) -> str:
        """Where to point a browser."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def decode(self, path: Path) -> Decode | None:
        """The decode function of a run's tokenizer, loaded in the background; None until then, or without one."""

        def load() -> None:
            try:
                self._decoders[path] = decoder_of(open_run(path))
            except (RockTokensError, ImportError) as error:
                log.info("tokens of %s are shown as detection named them: %s", path.name, error)

        if path not in self._decoders:
            self._decoders[path] = None
            threading.Thread(target=load, daemon=True).start()
        return self._decoders[path]


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the pages and files of runs; everything else is refused."""

    server: Viewer
    server_version = "rocktokens"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Answer a request."""
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            self._page(HTTPStatus.FORBIDDEN, *message_page("Not here", "This server answers on 127.0.0.1 only."))
            return
        try:
            with understood(self.server.folder):
                self._route(urlsplit(self.path))
        except RockTokensError as error:
            self._page(HTTPStatus.INTERNAL_SERVER_ERROR, *message_page("That did not work", str(error)))
        except OSError as error:  # the reader went away, or a file did
            log.debug("no answer to %s: %s", self.path, error)
            self.close_connection = True

    do_HEAD = do_GET

    def _route(self, url: Any) -> None:
        runs = find_runs(self.server.folder)
        parts = [unquote(part) for part in url.path.split("/")[1:]]
        if parts == [""]:
            self._home(runs)
            return
        if len(parts) < 3 or parts[0] != "run" or parts[1] not in runs:
            self._missing()
            return
        run, what = runs[parts[1]], parts[2:]
        if what == ["live"]:
            links = ((REPORT, "Report"), ("rollouts", "All rollouts"), ("/", "Runs"))
            self._page(HTTPStatus.OK, *served("live.html", "live.js", title=f"Live: {visible(run.name)}", links=links))
        elif what == ["live.json"]:
            body = json.dumps(live_data(run, self.server.decode(run)), allow_nan=False)
            self._send(HTTPStatus.OK, body.encode(), "application/json", DATA_POLICY)
        elif what == ["rollouts"]:
            asked = parse_qs(url.query).get("page", ["1"])[0]
            page = int(asked) if asked.isdecimal() and len(asked) < 9 else 1
            made = rollouts_page(Facts.of(run), page, self.server.decode(run))
            none = message_page("No rollouts", "This run has no scored rollouts to read yet.")
            self._page(HTTPStatus.OK if made else HTTPStatus.NOT_FOUND, *(made or none))
        elif (path := inside(run, *what)) is None:
            self._missing()
        elif path.name == REPORT:
            # The file is the run's: whatever stands in it, only scripts that this version writes are run.
            shown = of_another(path.read_bytes(), run)
            self._send(HTTPStatus.OK, shown, KINDS[".html"], f"{own_policy()}; {UNFRAMED}")
        else:
            self._send(HTTPStatus.OK, path.read_bytes(), KINDS[".csv"], DATA_POLICY)

    def _home(self, runs: dict[str, Path]) -> None:
        if (self.server.folder / MANIFEST).is_file():
            name, path = next(iter(runs.items()))
            there = f"/run/{quote(name)}/{REPORT if inside(path, REPORT) else 'live'}"
            self._send(HTTPStatus.FOUND, b"", KINDS[".html"], DATA_POLICY, [("Location", there)])
            return
        self._page(HTTPStatus.OK, *index_page(self.server.folder.resolve().name, runs))

    def _missing(self) -> None:
        self._page(HTTPStatus.NOT_FOUND, *message_page("Nothing here", "There is no such run, report or figure."))

    def _page(self, status: HTTPStatus, html: str, policy: str) -> None:
        self._send(status, html.encode(), KINDS[".html"], policy)

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
        said = message_page("Not possible", "This server answers requests to read its own pages.")
        self._page(HTTPStatus(code), *said)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line each."""
        log.debug(format, *args)


def view(
    path: str | Path,
    *,
    port: int = DEFAULT_PORT,
    open_browser: bool = False,
    ready: Callable[[Viewer], None] | None = None,
) -> None:
    """Serve until stopped; `ready` is told when the server listens.

    A single run that is no longer training and has no report gets one first.
    """
    path = Path(path)
    runs = find_runs(path)
    if not runs:
        raise RunError(f"{path} holds no run; make one with `rocktokens study`")
    if (path / MANIFEST).is_file() and not (path / REPORT).exists():
        run = open_run(path)
        if run.done("distill") or run.has("rollouts") or run.has("types"):
            report(path)
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
