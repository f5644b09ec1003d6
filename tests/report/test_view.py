"""The page that follows searches: asked over HTTP as a browser does, and its files changed."""

import http.client
import json
import threading

import pytest
from records_factory import make_execution, make_study, make_trial

from kbatch.cli import main as cli
from kbatch.records.json_codec import write_record
from kbatch.report.view import HOST, progress_of, view_page, view_server
from kbatch.study.study import load_study


def write_search(project, *trials, running=()):
    write_record(make_study().search, project / "kbatch.json")
    for trial in trials:
        write_record(trial, project / f"trial_{trial.trial_id}" / "kbatch.json")
    for trial_id, batch_size in running:
        folder = project / f"trial_{trial_id}"
        folder.mkdir(parents=True, exist_ok=True)
        values = {"batch_size": batch_size}
        state = {"trial_id": trial_id, "status": "RUNNING", "hyperparameters": {"values": values}}
        (folder / "trial.json").write_text(json.dumps(state))


@pytest.fixture
def project(tmp_path):
    project = tmp_path / "<b>first"
    write_search(project, make_trial(16), make_trial(32, status="failed"), running=[("0002", 64)])
    return project


@pytest.fixture
def ask(project):
    """Asks the server of the project: method, path and headers, the status and the text back."""
    with view_server([project], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]

        def answer(path, *, method="GET", host=f"{HOST}:{port}"):
            connection = http.client.HTTPConnection(HOST, port, timeout=60)
            connection.request(method, path, headers={"Host": host})
            response = connection.getresponse()
            text = response.read().decode()
            connection.close()
            return response, text

        yield answer
        server.shutdown()


def test_the_page_shows_the_progress_and_the_report(ask):
    response, page = ask("/")
    assert response.status == 200
    begins = "2 trials ended (2 of 4 batch sizes), 1 without a result; running: batch 64, "
    assert f"{begins}so the answer may change. Last record at " in page
    assert "32: failed, ValueError: the loss is not finite" in page
    assert "Samples/s" in page and "<svg" in page


def test_what_a_record_says_is_escaped(ask):
    _, page = ask("/")
    assert "&lt;b&gt;first" in page
    assert "<b>first" not in page


def test_the_version_changes_with_a_record_and_the_page_follows(ask, project):
    before = ask("/version")[1]
    assert ask("/version")[1] == before
    assert f'const version = "{before}"' in ask("/")[1]
    write_search(project, make_trial(16, accuracies=(0.5, 0.6)))
    between = ask("/version")[1]
    write_search(project, make_trial(128))
    after = ask("/version")[1]
    assert len({before, between, after}) == 3
    page = ask("/")[1]
    assert f'const version = "{after}"' in page
    assert "3 trials ended" in page


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9000"])
def test_a_forwarded_port_is_served(ask, host):
    assert ask("/version", host=host)[0].status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "localhost.evil:8642"])
def test_another_name_of_this_machine_is_refused(ask, host):
    assert ask("/", host=host)[0].status == 403
    assert ask("/version", host=host)[0].status == 403


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/kbatch.json", "GET", 404), ("/../etc/passwd", "GET", 404), ("/", "POST", 501)],
)
def test_nothing_else_is_served(ask, path, method, status):
    assert ask(path, method=method)[0].status == status


def test_it_cannot_be_framed_or_kept(ask):
    response, page = ask("/")
    assert response.headers["X-Frame-Options"] == "DENY"
    assert response.headers["Cache-Control"] == "no-store"
    assert "default-src 'none'; connect-src 'self';" in page


def test_several_searches_stand_on_one_page(project, tmp_path):
    write_search(tmp_path / "second", running=[("0000", 16)])
    write_search(tmp_path / "third", make_trial(8))
    with view_server([project, tmp_path / "second", tmp_path / "third"], 0):
        pass
    found = progress_of(tmp_path / "second", load_study(tmp_path / "second"))
    assert found.text == "0 trials ended (0 of 4 batch sizes); running: batch 16."


def test_searches_of_one_name_are_told_apart_by_their_folders(tmp_path):
    folders = [tmp_path / first / "digits" for first in ("images", "texts")]
    for folder in folders:
        write_search(folder, make_trial(16))
    page = view_page(folders, "")
    for folder in folders:
        assert f"<strong>{folder}</strong>" in page
        assert page.count(f"study · {folder}") == 2
    assert f"<strong>{folders[0]}" not in view_page(folders[:1], "")


def test_a_trial_that_goes_on_has_not_ended(tmp_path):
    write_search(tmp_path, make_trial(16), running=[(make_trial(16).trial_id, 16)])
    found = progress_of(tmp_path, load_study(tmp_path))
    assert found.text.startswith("0 trials ended (0 of 4 batch sizes); running: batch 16.")


def test_the_report_is_of_what_has_ended(tmp_path):
    """A search that has just begun has no answer yet, and what trains is no failure."""
    write_search(tmp_path, make_trial(32, status="running"), running=[("0032", 32)])
    assert "No trial has ended yet" in view_page([tmp_path], "")
    again = make_trial(16, make_execution(16), make_execution(16, seed=1, status="running"))
    write_search(tmp_path, again, make_trial(64, status="interrupted"))
    page = view_page([tmp_path], "")
    assert "Batch size 16 had the best" in page
    text = "0 trials ended (0 of 4 batch sizes); interrupted: batch 64; running: batch 32. "
    assert text in page
    assert "no result" not in page and "n/a (running)" not in page


def test_a_half_written_state_is_passed_over(tmp_path):
    write_search(tmp_path, make_trial(16))
    (tmp_path / "trial_0009").mkdir()
    (tmp_path / "trial_0009" / "trial.json").write_text('{"status": "RUN')
    assert progress_of(tmp_path, load_study(tmp_path)).text.startswith("1 trial ended (1 of")


def test_a_folder_without_a_study_and_a_taken_port_say_what_to_do(project, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert cli.main(["view", str(tmp_path / "empty")]) == 1
    assert "needs the project directory of a search" in capsys.readouterr().err
    with view_server([project], 0) as server:
        port = str(server.server_address[1])
        assert cli.main(["view", str(project), "--port", port]) == 1
    assert f"0 for any that is free. Received: --port {port} (" in capsys.readouterr().err
    assert cli.main(["view", str(project), "--port", "70000"]) == 1
    assert "0 for any that is free. Received: --port 70000" in capsys.readouterr().err
