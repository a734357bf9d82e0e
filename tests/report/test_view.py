"""`rocktokens view`: on this machine only, nothing but reports and figures, and two runs side by side."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import re
import threading
from pathlib import Path

import pytest
from report_fixture import make_run

from rocktokens.errors import ConfigError, RunError
from rocktokens.facts import Facts
from rocktokens.report.build import report
from rocktokens.report.live import live_data
from rocktokens.report.page import own_policy
from rocktokens.report.pages import TABLES_SCRIPT, overlap, sampled_accuracy
from rocktokens.report.policy import content_hash
from rocktokens.report.view import Viewer, find_runs, view


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two runs, a secret beside them and one outside, and links that lead out."""
    base = tmp_path_factory.mktemp("view")
    folder = base / "runs"
    for name, seed in (("one", 0), ("two <b>", 1)):
        make_run(folder / name, stages="detect", prompts=10, seed=seed)
        report(folder / name)
    (base / "secret.html").write_text("secret")
    (folder / "secret.html").write_text("secret")
    (folder / "one" / "secret.svg").write_text("secret")
    (folder / "one" / "figures" / "out.svg").symlink_to(base / "secret.html")
    (folder / "one" / "figures" / "deep").mkdir()
    (folder / "one" / "figures" / "deep" / "x.svg").write_text("secret")
    outside = base / "outside"
    make_run(outside, stages="score", prompts=4)
    (folder / "link").symlink_to(outside)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    viewer = Viewer(folder, port=0)
    thread = threading.Thread(target=viewer.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield viewer
    viewer.shutdown()
    viewer.server_close()


def ask(server: Viewer, path: str, *, method: str = "GET", host: str | None = None) -> http.client.HTTPResponse:
    """A raw request: the path goes out as it is written here."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_it_listens_on_loopback_only(server):
    assert server.server_address[0] == "127.0.0.1"


def test_the_folder_lists_its_runs_and_no_others(server, folder):
    page = ask(server, "/").body.decode()
    assert set(find_runs(folder)) == {"one", "two <b>"}
    assert 'href="/run/one/report.html"' in page
    assert "two &lt;b&gt;" in page
    assert "<b>" not in page
    assert "link" not in re.findall(r"/run/([^/]*)/", page)


def test_reports_and_figures_are_served(server):
    answer = ask(server, "/run/one/report.html")
    assert answer.status == 200
    assert b'id="verdict"' in answer.body
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    rows = ask(server, "/run/one/figures/funnel.csv")
    assert rows.headers["Content-Type"].startswith("text/csv")
    assert rows.body.startswith(b"token_id,")
    assert ask(server, "/run/two%20%3Cb%3E/report.html").status == 200
    head = ask(server, "/run/one/report.html", method="HEAD")
    assert head.status == 200
    assert head.body == b""


ANSWERS = ("/", "/compare?a=one&b=one", "/run/one/report.html", "/run/one/live", "/run/one/live.json", "/nowhere")


@pytest.mark.parametrize("path", [*ANSWERS, "/run/one/rollouts", "/run/one/figures/funnel.csv"])
def test_every_answer_has_the_usual_headers(server, path):
    found = ask(server, path).headers
    policy = found["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy or "/figures/" in path
    assert "script-src" not in policy or "script-src 'sha256-" in policy
    assert found["X-Content-Type-Options"] == "nosniff"
    assert found["X-Frame-Options"] == "DENY"
    assert found["Referrer-Policy"] == "no-referrer"
    assert found["Cache-Control"] == "no-store"
    assert found["Cross-Origin-Opener-Policy"] == found["Cross-Origin-Resource-Policy"] == "same-origin"


def test_a_refused_method_has_them_too(server):
    found = ask(server, "/", method="POST")
    assert found.status == 501
    assert found.headers["X-Frame-Options"] == "DENY"
    assert "default-src 'none'" in found.headers["Content-Security-Policy"]


def test_scripts_of_a_report_that_this_version_did_not_write_are_not_run(tmp_path):
    make_run(tmp_path / "run", stages="detect", prompts=4)
    evil = "<html><body class='x'><script>fetch('/run/other/report.html')</script>old</body></html>"
    (tmp_path / "run" / "report.html").write_text(evil)
    viewer = Viewer(tmp_path, port=0)
    threading.Thread(target=viewer.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    answer = ask(viewer, "/run/run/report.html")
    viewer.shutdown()
    viewer.server_close()
    assert own_policy() in answer.headers["Content-Security-Policy"]
    assert content_hash("fetch('/run/other/report.html')") not in answer.headers["Content-Security-Policy"]
    assert b"was not written by this version" in answer.body


def test_one_run_with_values_of_another_type_leaves_the_list(tmp_path):
    for name in ("good", "odd"):
        make_run(tmp_path / name, stages="detect", prompts=6)
    manifest = json.loads((tmp_path / "odd" / "run.json").read_text())
    manifest["stages"]["distill"] = {"accuracy_before": {"accuracy": "x"}, "accuracy_after": {"accuracy": []}}
    manifest["config"]["pair"] = {"student": 5, "teacher": [1]}
    (tmp_path / "odd" / "run.json").write_text(json.dumps(manifest))
    viewer = Viewer(tmp_path, port=0)
    threading.Thread(target=viewer.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    found = ask(viewer, "/")
    viewer.shutdown()
    viewer.server_close()
    assert found.status == 200
    assert b"/run/good/" in found.body
    assert b"odd" in found.body


@pytest.mark.parametrize(
    "path",
    [
        "/run/one/run.json",
        "/run/one/types.parquet",
        "/run/one/secret.svg",
        "/secret.html",
        "/run/../secret.html",
        "/run/one/../../../secret.html",
        "/run/one/figures/../report.html",
        "/run/one/figures/../../../secret.html",
        "/run/one/figures/..%2f..%2f..%2fsecret.html",
        "/run/one/figures/%2e%2e/%2e%2e/secret.html",
        "/run/one/figures/..%5c..%5csecret.html",
        "/run/one/figures/%2fetc%2fpasswd",
        "/run/one/figures//etc/passwd",
        "/run/one/figures/out.svg",
        "/run/one/figures/deep/x.svg",
        "/run/one/figures/deep%2fx.svg",
        "/run/one/figures/",
        "/run/one/figures/funnel.csv%00.svg",
        "/run/one/figures/.funnel.csv.tmp",
        f"/run/one/figures/{'a' * 300}.svg",
        f"/run/{'a' * 300}/report.html",
        "/run/link/report.html",
        "/run/../runs/one/report.html",
        "/run/%2e%2e/outside/report.html",
        "/run/one",
        "/compare?a=one&b=../outside",
        "/compare?a=one&b=link",
        "/compare",
    ],
)
def test_nothing_else_is_served(server, path):
    answer = ask(server, path)
    assert answer.status == 404, answer.body[:80]
    assert b"secret" not in answer.body


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:80", "127.0.0.1:1", "127.0.0.1.evil.example", "*"])
def test_another_host_name_is_refused(server, host):
    answer = ask(server, "/run/one/report.html", host=host or "")
    assert answer.status == 403
    assert b'id="verdict"' not in answer.body


def test_localhost_is_this_host(server):
    assert ask(server, "/", host=f"localhost:{server.server_port}").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_reading_is_possible(server, method):
    assert ask(server, "/run/one/report.html", method=method).status == 501


def test_two_runs_stand_side_by_side(server, folder):
    answer = ask(server, "/compare?a=one&b=two+%3Cb%3E")
    page = answer.body.decode()
    assert answer.status == 200
    found = overlap(Facts.of(folder / "one"), Facts.of(folder / "two <b>"))
    assert f"Jaccard {found['jaccard']:.2f}" in page
    assert "enrichment" in page
    assert "Accuracy" in page
    assert f"Rocks in both ({len(found['shared'])})" in page
    assert page.count("<script") == 1
    policy = answer.headers["Content-Security-Policy"]
    assert content_hash(TABLES_SCRIPT) in policy
    assert "unsafe" not in policy.split("script-src")[1]
    assert "connect-src" not in policy
    assert page.count("/report.html") >= 2  # links to both reports
    assert "detect.seed" in page.split("Settings that differ")[1].split("</section>")[0]


def test_the_list_shows_a_verdict_a_date_and_a_chart_for_every_run(server):
    page = ask(server, "/").body.decode()
    assert page.count('class="card"') == 2
    assert re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d", page)
    assert "share of the loss that the rocks carry" in page
    assert "/run/two%20%3Cb%3E/rollouts" in page


def test_all_rollouts_are_read_a_page_at_a_time(server, folder):
    page = ask(server, "/run/one/rollouts").body.decode()
    assert "40 rollouts, 1 to 40 on this page" in page
    packed = re.search(r'id="viewer-packed">([A-Za-z0-9+/=]*)</script>', page)[1]
    data = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert [row["id"] for row in data["rollouts"]] == [
        row["rollout_id"] for row in Facts.of(folder / "one").rows("rollouts")
    ]
    for asked in ("2", "999999999999", "-1", "x", ""):
        assert ask(server, f"/run/one/rollouts?page={asked}").status == 200


def test_pages_hold_fifty_rollouts_and_the_last_one_the_rest(tmp_path):
    make_run(tmp_path / "run", stages="score", prompts=15)
    viewer = Viewer(tmp_path, port=0)
    threading.Thread(target=viewer.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        assert "51 to 60 on this page" in ask(viewer, "/run/run/rollouts?page=2").body.decode()
    finally:
        viewer.shutdown()
        viewer.server_close()


def test_the_live_page_may_ask_this_server_and_nobody_else(server):
    answer = ask(server, "/run/one/live")
    assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
    data = json.loads(ask(server, "/run/one/live.json").body)
    assert data["curves"] == {}
    assert data["rollouts"] == []
    assert ask(server, "/run/one/live.json", host="evil.example").status == 403


def test_live_numbers_are_those_of_the_training_record(tmp_path):
    run = make_run(tmp_path / "run", prompts=6)
    occurrences = run.occurrences("select * exclude (step) from occurrences where step = 100")
    with run.part_writer(20, folder="telemetry") as writer:
        writer.write(occurrences)
    found = live_data(run.path)
    curve, table = found["curves"]["distillation"], run.read("training").to_pylist()
    assert curve["step"] == [row["step"] for row in table if row["step"]]
    assert curve["loss_rocks"][-1] == pytest.approx(table[-1]["loss_rocks"], rel=1e-4)
    assert [row[:2] for row in curve["evaluations"]] == [
        [row["step"], pytest.approx(row["accuracy"], rel=1e-4)] for row in table if row["accuracy"] is not None
    ]
    rocks = {Facts(run).texts[token_id] for token_id in Facts(run).rock_ids}
    shown = [token for rollout in found["rollouts"] for token in rollout["tokens"]]
    assert {token[0].removesuffix("\n") for token in shown if token[2]} <= rocks
    assert any(token[2] for token in shown)


def test_a_record_that_is_being_written_is_passed_over(tmp_path):
    run = make_run(tmp_path / "run", stages="score", prompts=4)
    (run.path / "training.parquet").write_bytes(b"PAR1 half")
    assert live_data(run.path)["curves"] == {}


def test_accuracy_is_the_mean_over_prompts_with_its_interval(folder):
    facts = Facts.of(folder / "one")
    found = sampled_accuracy(facts)
    right = [row["correct"] for row in facts.rows("rollouts")]
    assert found.value == pytest.approx(sum(right) / len(right))
    assert found.low < found.value < found.high


def test_overlap_is_by_text_and_exact(folder):
    a, b = Facts.of(folder / "one"), Facts.of(folder / "two <b>")
    a.__dict__["rocks"] = [{"token": token, "token_id": place} for place, token in enumerate("abc")]
    b.__dict__["rocks"] = [{"token": token, "token_id": 9 - place} for place, token in enumerate("bcd")]
    found = overlap(a, b)
    assert (found["shared"], found["only_a"], found["only_b"]) == (["b", "c"], ["a"], ["d"])
    assert found["jaccard"] == 0.5


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


def test_what_cannot_be_shown_is_said(tmp_path, server):
    with pytest.raises(RunError, match="holds no run"):
        view(tmp_path)
    with pytest.raises(RunError, match="no directory"):
        view(tmp_path / "nowhere")
    make_run(tmp_path / "run", stages="score", prompts=4)
    report(tmp_path / "run")
    with pytest.raises(ConfigError, match="another --port"):
        view(tmp_path / "run", port=server.server_port)
