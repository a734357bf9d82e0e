"""`rocktokens view`: on this machine only, and nothing but reports, the rows of figures and its own pages."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_fixture import make_run

from rocktokens.errors import ConfigError, RunError
from rocktokens.facts import Facts
from rocktokens.report.live import live_data
from rocktokens.report.page import content_hash, own_policy
from rocktokens.report.stage import report
from rocktokens.report.view import HEADERS, Viewer, find_runs, view
from rocktokens.run import open_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two runs, a secret next to them and one outside, and links that lead out."""
    base = tmp_path_factory.mktemp("view")
    folder = base / "runs"
    for name, seed in (("one", 0), ("two <b>", 1)):
        make_run(folder / name, stages="detect", prompts=20, seed=seed)
        report(folder / name)
    for secret in (base, folder):
        (secret / "secret.html").write_text("secret")
    for name in ("secret.csv", "figures/secret.html", "figures/secret.svg"):
        (folder / "one" / name).write_text("secret")
    (folder / "one" / "figures" / "out.csv").symlink_to(base / "secret.html")
    (folder / "one" / "figures" / "deep").mkdir()
    (folder / "one" / "figures" / "deep" / "x.csv").write_text("secret")
    make_run(base / "outside", stages="score", prompts=4)
    (folder / "link").symlink_to(base / "outside")
    return folder


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Viewer]:
    viewer = Viewer(folder, port=0)
    threading.Thread(target=viewer.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield viewer
    finally:
        viewer.shutdown()
        viewer.server_close()


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as viewer:
        yield viewer


def ask(server: Viewer, path: str, *, method: str = "GET", host: str | None = None) -> http.client.HTTPResponse:
    """A raw request: the path goes out as it is written here."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_the_folder_lists_its_runs_with_verdict_and_date(server, folder):
    assert server.server_address[0] == "127.0.0.1"
    page = ask(server, "/", host=f"localhost:{server.server_port}").body.decode()
    assert set(find_runs(folder)) == {"one", "two <b>"}
    assert 'href="/run/one/report.html"' in page
    assert "/run/two%20%3Cb%3E/rollouts" in page
    assert "two &lt;b&gt;" in page
    assert "<b>" not in page
    assert "link" not in re.findall(r"/run/([^/]*)/", page)
    assert page.count('class="badge none">Not tested') == 2
    assert re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d", page)


def test_reports_and_rows_are_served(server):
    answer = ask(server, "/run/one/report.html")
    assert answer.status == 200
    assert b'id="verdict"' in answer.body
    rows = ask(server, "/run/one/figures/funnel.csv")
    assert rows.headers["Content-Type"].startswith("text/csv")
    assert rows.body.startswith(b"token_id,")
    assert ask(server, "/run/two%20%3Cb%3E/report.html").status == 200
    assert ask(server, "/run/one/report.html", method="HEAD").body == b""


ANSWERS = ("/", "report.html", "live", "live.json", "rollouts", "figures/funnel.csv", "/nowhere", "POST")


@pytest.mark.parametrize("path", ANSWERS)
def test_every_answer_has_the_usual_headers(server, path):
    method, place = ("POST", "/") if path == "POST" else ("GET", path if path[0] == "/" else f"/run/one/{path}")
    found = ask(server, place, method=method).headers
    policy = found["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "script-src" not in policy or "script-src 'sha256-" in policy
    assert ("connect-src" in policy) == (path == "live")
    assert {name: found[name] for name, _ in HEADERS} == dict(HEADERS)


def test_scripts_of_a_report_that_this_version_did_not_write_are_not_run(tmp_path):
    make_run(tmp_path / "run", stages="detect", prompts=4)
    evil = "<html><body class='x'><script>fetch('/run/other/report.html')</script>old</body></html>"
    (tmp_path / "run" / "report.html").write_text(evil)
    with serving(tmp_path) as viewer:
        answer = ask(viewer, "/run/run/report.html")
    assert own_policy() in answer.headers["Content-Security-Policy"]
    assert content_hash("fetch('/run/other/report.html')") not in answer.headers["Content-Security-Policy"]
    assert b"was not written by this version" in answer.body


def test_one_run_with_values_of_another_type_does_not_hide_the_others(tmp_path):
    for name in ("good", "odd"):
        make_run(tmp_path / name, stages="detect", prompts=6)
    odd = open_run(tmp_path / "odd")
    odd.manifest["stages"]["distill"] = {"accuracy_before": {"accuracy": "x"}, "accuracy_after": {"accuracy": []}}
    odd.manifest["config"]["pair"] = {"student": 5, "teacher": [1]}
    odd.save()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_bytes(b"\xff\xfe{")
    assert set(find_runs(tmp_path)) == {"good", "odd"}
    with serving(tmp_path) as viewer:
        found = ask(viewer, "/")
    assert found.status == 200
    assert b"/run/good/" in found.body
    assert b"odd" in found.body


NOT_SERVED = """
    /run/one/run.json /run/one/types.parquet /run/one/secret.csv /secret.html /run/../secret.html /run/one
    /run/one/../../../secret.html /run/one/figures/../report.html /run/one/figures/..%2f..%2f..%2fsecret.html
    /run/one/figures/%2e%2e/%2e%2e/secret.html /run/one/figures/..%5c..%5csecret.csv /run/one/figures/%2fetc%2fpasswd
    /run/one/figures//etc/passwd /run/one/figures/out.csv /run/one/figures/secret.html /run/one/figures/secret.svg
    /run/one/figures/deep/x.csv /run/one/figures/deep%2fx.csv /run/one/figures/ /run/one/figures/secret.svg%00.csv
    /run/one/figures/.funnel.csv.tmp /run/link/report.html /run/../runs/one/report.html /run/%2e%2e/outside/report.html
""".split()  # noqa: SIM905 - 24 lines as a list


@pytest.mark.parametrize("path", [*NOT_SERVED, f"/run/one/figures/{'a' * 300}.csv", f"/run/{'a' * 300}/report.html"])
def test_nothing_else_is_served(server, path):
    answer = ask(server, path)
    assert answer.status == 404, answer.body[:80]
    assert b"secret" not in answer.body


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:80", "127.0.0.1:1", "127.0.0.1.evil.example", "*"])
def test_another_host_name_is_refused(server, host):
    for path in ("/run/one/report.html", "/run/one/live.json"):
        answer = ask(server, path, host=host)
        assert answer.status == 403
        assert b'id="verdict"' not in answer.body


def test_all_rollouts_are_read_fifty_at_a_time(server, folder):
    page = ask(server, "/run/one/rollouts").body.decode()
    assert "80 rollouts, 1 to 50 on this page" in page
    data = re.search(r'id="viewer-packed">([A-Za-z0-9+/=]*)</script>', page)[1]
    shown = [row["id"] for row in json.loads(gzip.decompress(base64.b64decode(data)))["rollouts"]]
    assert shown == [row["rollout_id"] for row in Facts.of(folder / "one").rows("rollouts")][:50]
    for asked in ("2", "99999999"):
        assert "51 to 80 on this page" in ask(server, f"/run/one/rollouts?page={asked}").body.decode()
    for asked in ("999999999999", "-1", "x", ""):
        assert ask(server, f"/run/one/rollouts?page={asked}").status == 200


def test_live_numbers_are_those_of_the_training_record(run):
    rows = run.occurrences("select * exclude (step) from occurrences where step = 100")
    run.write_part(20, rows, folder="telemetry")
    found = live_data(run.path)
    curve, table = found["curves"]["distillation"], run.read("training").to_pylist()
    assert curve["step"] == [row["step"] for row in table if row["step"]]
    assert curve["loss_rocks"][-1] == pytest.approx(table[-1]["loss_rocks"], rel=1e-4)
    assert [row[:2] for row in curve["evaluations"]] == [
        [row["step"], pytest.approx(row["accuracy"], rel=1e-4)] for row in table if row["accuracy"] is not None
    ]
    facts = Facts(run)
    shown = [token for rollout in found["rollouts"] for token in rollout["tokens"] if token[2]]
    assert {token[0].removesuffix("\n") for token in shown} <= {facts.texts[token_id] for token_id in facts.rock_ids}
    assert shown
    (run.path / "training.parquet").write_bytes(b"PAR1 half")  # being written
    assert "distillation" not in live_data(run.path)["curves"]


def test_a_single_run_is_shown_at_once_and_gets_a_report_first(tmp_path):
    make_run(tmp_path / "run", stages="score", prompts=4)
    seen = {}

    def look(server: Viewer) -> None:
        def visit() -> None:
            seen["home"] = ask(server, "/").headers["Location"]
            seen["report"] = ask(server, seen["home"]).status
            server.shutdown()

        threading.Thread(target=visit, daemon=True).start()

    view(tmp_path / "run", port=0, ready=look)
    assert seen == {"home": "/run/run/report.html", "report": 200}


def test_what_cannot_be_shown_is_said(tmp_path, folder, server):
    for path, word in ((tmp_path, "no run"), (tmp_path / "nowhere", "directory")):
        with pytest.raises(RunError, match=word):
            view(path)
    with pytest.raises(ConfigError, match="--port"):
        view(folder / "one", port=server.server_port)
