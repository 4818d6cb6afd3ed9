"""The server of `groupwise watch`: what it answers and whom it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from groupwise.cli import main
from groupwise.errors import ConfigError
from groupwise.report import watch_server
from groupwise.report.compare_runs import listed
from groupwise.report.run_reader import RunIndex
from groupwise.report.watch_server import application, changes, is_loopback, listen
from groupwise.tracking.run_files import MetricsFile
from tests.support.synthetic_runs import group_of, make_run, make_search, rollout

LOCAL = "http://127.0.0.1:8477"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first")
    make_run(folder / "second", steps=3)
    (folder / "not a run").mkdir()
    (folder / "secret.txt").write_text("secret")
    return folder


@pytest.fixture(scope="module")
def client(runs: Path) -> TestClient:
    return TestClient(application(RunIndex.of([runs])), base_url=LOCAL)


def test_the_page_and_its_parts_are_served(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]
    for name in ("app.js", "style.css", "vendor/uplot/uPlot.esm.js", "vendor/uplot/LICENSE"):
        assert client.get(f"/page/{name}").status_code == 200
    assert "javascript" in client.get("/page/app.js").headers["content-type"]


def test_runs_are_listed_with_their_state(client: TestClient) -> None:
    found = {run["id"]: run for run in client.get("/api/runs").json()}
    assert set(found) == {"first", "second"}
    first = found["first"]
    assert (first["state"], first["step"], first["max_steps"]) == ("finished", 6, 6)
    assert first["steps"] == [1, 2, 3, 4, 5, 6]
    assert first["title"] == "countdown · tiny"


def test_every_view_gets_its_answer(client: TestClient) -> None:
    curves = client.get("/api/runs/first/curves").json()
    assert curves["step"] == [1, 2, 3, 4, 5, 6]
    assert curves["evaluations"][0]["scores"]["greedy"] == pytest.approx([0.2, 0.1, 0.3])
    assert client.get("/api/runs/first/curves?after=4").json()["step"] == [5, 6]
    assert client.get("/api/runs/first/alarms").json()["steps"] == 6
    assert client.get("/api/runs/first/distribution").json()["steps"] == [1, 2, 3, 4, 5, 6]
    assert len(client.get("/api/runs/first/steps/2").json()) == 2
    assert len(client.get("/api/runs/first/steps/2/groups/1").json()["members"]) == 3
    assert client.get("/api/runs/first/steps/2/groups/1/members/2").json()["member"] == 2
    assert client.get("/api/runs/first/search?text=answer&first=6").json()["searched"] == 1
    assert "max_steps: 6" in client.get("/api/runs/first/settings").json()["text"]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", steps=1, groups=lambda s: [group_of([rollout("x", advantage=float("nan"))])]
    )
    found = TestClient(application(RunIndex.of([run.path])), base_url=LOCAL).get("/api/runs/run/steps/1")
    assert found.json()[0]["members"][0]["advantage"] is None


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/absent/curves",
        "/api/runs/not%20a%20run/curves",
        "/api/runs/..%2F..%2Fetc/settings",
        "/api/runs/%2e%2e/settings",
        "/api/runs/first/steps/99",
        "/api/runs/first/steps/-1",
        "/api/runs/first/steps/1%2F..%2F2",
        "/api/runs/first/steps/1/groups/99",
        "/api/runs/first/steps/1/groups/0/members/99",
        "/page/../../server.py",
        "/page/%2e%2e/%2e%2e/server.py",
        "/page//etc/passwd",
        "/secret.txt",
        "/page/absent.js",
    ],
)
def test_only_what_was_given_is_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "secret" not in answer.text


def test_a_damaged_file_is_told_and_passed_over_in_the_rest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    run.rollouts_at(2).write_text("PAR1 no more")
    client = TestClient(application(RunIndex.of([run.path])), base_url=LOCAL)
    answer = client.get("/api/runs/run/steps/2")
    assert (answer.status_code, "step-000002.parquet is damaged" in answer.text) == (500, True)
    assert client.get("/api/runs/run/distribution").json()["steps"] == [1, 3]
    assert len(client.get("/api/runs/run/search?text=answer").json()["rollouts"]) == 12


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    make_run(tmp_path / "good", steps=2)
    long_lock, nested, folder, settings = (
        make_run(tmp_path / name, steps=1) for name in ("lock", "nested", "folder", "settings")
    )
    (long_lock.path / ".lock").write_text("9" * 30)
    deep = "[" * 100_000
    nested.metrics.write_text(f'{{"step": 1, "x": {deep}\n{{"step": {10**30}}}\n{{"step": true}}\n')
    nested.stats.write_text(deep)
    (nested.evaluations / "before.json").write_text(deep)
    folder.metrics.unlink()
    folder.metrics.mkdir()
    settings.config.write_text(deep)
    client = TestClient(application(RunIndex.of([tmp_path])), base_url=LOCAL)
    found = {run["id"]: run for run in client.get("/api/runs").json()}
    assert set(found) == {"good", "lock", "nested", "folder", "settings"}
    assert found["good"]["step"] == 2
    for name in found:
        for view in ("curves", "alarms", "distribution"):
            assert client.get(f"/api/runs/{name}/{view}").status_code == 200
    assert {run.name for run in listed(tmp_path)} == set(found)


def test_a_run_that_cannot_be_read_at_all_is_listed_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", steps=1)
    index = RunIndex.of([tmp_path])
    monkeypatch.setattr(index.runs["run"], "tail", None)
    (found,) = TestClient(application(index), base_url=LOCAL).get("/api/runs").json()
    assert (found["name"], found["state"]) == ("run", "damaged")


def test_settings_that_are_a_link_to_elsewhere_are_not_served(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "run", steps=1)
    (tmp_path / "secret.yaml").write_text("password: secret")
    run.config.unlink()
    run.config.symlink_to(tmp_path / "secret.yaml")
    client = TestClient(application(RunIndex.of([tmp_path / "runs"])), base_url=LOCAL)
    answer = client.get("/api/runs/run/settings")
    assert (answer.status_code, "secret" in answer.text) == (404, False)


def test_a_run_that_begins_later_comes_first(tmp_path: Path) -> None:
    os.utime(make_run(tmp_path / "a", steps=1).config, (1, 1))
    client = TestClient(application(RunIndex.of([tmp_path])), base_url=LOCAL)
    assert [run["id"] for run in client.get("/api/runs").json()] == ["a"]
    os.utime(make_run(tmp_path / "b", steps=1).config, (2, 2))
    assert [run["id"] for run in client.get("/api/runs").json()] == ["b", "a"]


def test_the_usual_folder_need_not_exist_and_a_named_one_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "no runs yet" in capsys.readouterr().out
    assert main(["runs", "--output-dir", "absent"]) == 2
    index = RunIndex.of(["runs"], must_exist=False)
    assert index.runs == {}
    make_run(tmp_path / "runs" / "first", steps=1)
    assert list(index.refresh()) == ["first"]
    with pytest.raises(ConfigError, match="there is no folder absent"):
        RunIndex.of(["absent"])


def test_a_number_that_is_none_is_refused(client: TestClient) -> None:
    for query in ("first=x", "least_reward=abc", "last=nan", "last=inf", "least_length=1e30", "skip=-1e30"):
        assert client.get(f"/api/runs/first/search?{query}").status_code == 400


@pytest.mark.parametrize("number", ["9" * 15, "9" * 20, "9" * 300, "9" * 5000])
def test_numbers_larger_than_any_in_a_run_are_not_found(client: TestClient, number: str) -> None:
    steps = "/api/runs/first/steps"
    for path in (f"{steps}/{number}", f"{steps}/1/groups/{number}", f"{steps}/1/groups/0/members/{number}"):
        assert client.get(path).status_code == 404
    assert client.get(f"{steps}/1/groups/0/members/0").status_code == 200


def test_a_run_outside_the_given_folders_is_not_found(runs: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "other", steps=1)
    only = TestClient(application(RunIndex.of([runs / "first"])), base_url=LOCAL)
    assert [run["id"] for run in only.get("/api/runs").json()] == ["first"]
    for name in ("second", "other", str(tmp_path / "other")):
        assert only.get(f"/api/runs/{name}/curves").status_code == 404


def test_runs_of_one_name_are_told_apart_and_new_ones_appear(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "run", steps=1)
    make_run(tmp_path / "b" / "run", steps=2)
    index = RunIndex.of([tmp_path / "a", tmp_path / "b"])
    assert {name: run.max_steps for name, run in index.runs.items()} == {"run": 1, "run-2": 2}
    make_run(tmp_path / "a" / "new", steps=1)
    assert set(index.refresh()) == {"run", "run-2", "new"}
    with pytest.raises(ConfigError, match="there is no folder"):
        RunIndex.of([tmp_path / "absent"])


# Who may look


def test_headers_forbid_what_the_page_does_not_need(client: TestClient) -> None:
    headers = client.get("/api/runs").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("host", ["127.0.0.1:8477", "localhost:8477", "[::1]:8477", "127.0.0.1"])
def test_loopback_names_are_served(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8477", "127.0.0.1.evil.example", "192.168.0.2:8477", "", "[::1"]
)
def test_other_names_for_this_machine_are_refused(client: TestClient, host: str) -> None:
    """DNS rebinding: a site's own name that resolves to 127.0.0.1."""
    assert client.get("/api/runs", headers={"host": host}).status_code == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://127.0.0.1:9999", "null", "https://127.0.0.1"]
)
def test_requests_of_other_origins_are_refused(client: TestClient, origin: str) -> None:
    assert client.get("/api/runs", headers={"origin": origin}).status_code == 403
    assert client.get("/api/runs", headers={"origin": LOCAL}).status_code == 200


def test_what_another_site_embeds_is_refused_and_its_links_work(client: TestClient) -> None:
    embedded = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    framed = {**followed, "sec-fetch-dest": "iframe"}
    codes = [client.get("/", headers=headers).status_code for headers in (embedded, followed, framed)]
    assert codes == [403, 200, 403]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405


TOKEN = "a token of good length"


@pytest.fixture
def elsewhere(runs: Path) -> TestClient:
    app = application(RunIndex.of([runs]), token=TOKEN)
    return TestClient(app, base_url="http://192.168.0.2:8477", follow_redirects=False)


def test_elsewhere_nothing_is_told_without_the_token(elsewhere: TestClient) -> None:
    for path in ("/", "/api/runs", "/page/app.js", "/api/events", "/?token=wrong", "/?token="):
        assert elsewhere.get(path).status_code == 401
    for headers in ({"authorization": "Bearer wrong"}, {"cookie": "groupwise_token=wrong"}):
        assert elsewhere.get("/api/runs", headers=headers).status_code == 401


def test_the_token_is_exchanged_for_a_cookie_and_leaves_the_address(elsewhere: TestClient) -> None:
    first = elsewhere.get("/", params={"token": TOKEN})
    assert (first.status_code, first.headers["location"]) == (303, "/")
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert elsewhere.get("/api/runs").status_code == 200
    assert elsewhere.get("/api/runs", headers={"origin": "http://evil.example"}).status_code == 403


@pytest.mark.parametrize("path", ["//evil.example/", "///evil.example/", "/\\evil.example/"])
def test_the_token_never_leads_to_another_site(elsewhere: TestClient, path: str) -> None:
    answer = elsewhere.get(f"http://192.168.0.2:8477{path}?token={TOKEN}")
    place = answer.headers["location"]
    assert place.startswith("/")
    assert not place.startswith(("//", "/\\"))


def test_a_program_may_send_the_token_as_bearer(elsewhere: TestClient) -> None:
    assert elsewhere.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "192.168.0.2", "localhost.evil.example")),
    ],
)
def test_loopback_is_told_from_the_address(host: str, local: bool) -> None:
    assert is_loopback(host) == local


# Live


def test_changes_are_told_as_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_server, "POLL_SECONDS", 0.01)
    run = make_run(tmp_path / "run", steps=2)
    index = RunIndex.of([tmp_path])

    async def watch() -> list[str]:
        stream = changes(index)
        told = [await anext(stream)]
        MetricsFile(run.metrics).append(3, {"reward/mean": 1.0})
        told.append(await anext(stream))
        make_run(tmp_path / "new", steps=1)
        told.append(await anext(stream))
        await stream.aclose()  # type: ignore[attr-defined]
        return told

    retry, grown, new = asyncio.run(watch())
    assert retry == "retry: 2000\n\n"
    news = event(grown)
    assert (news["run"], news["step"]) == ("run", 3)
    assert event(new)["run"] == "new"


def event(text: str) -> dict[str, Any]:
    kind, data, *_ = text.split("\n")
    assert kind == "event: change"
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return found


def test_a_silent_run_keeps_the_connection_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_server, "POLL_SECONDS", 0.001)
    make_run(tmp_path / "run", steps=1)

    async def watch() -> str:
        stream = changes(RunIndex.of([tmp_path]))
        await anext(stream)
        return await anext(stream)

    assert asyncio.run(watch()) == ": keep-alive\n\n"


# The command


@pytest.fixture
def command(runs: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    words = [sys.executable, "-m", "groupwise", "watch", str(runs), "--port", "0"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    yield process, [process.stdout.readline()]
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_command_serves_on_loopback_until_ctrl_c(
    command: tuple[subprocess.Popen[str], list[str]],
) -> None:
    import httpx

    process, (line,) = command
    assert line.startswith("watching 2 runs at http://127.0.0.1:")
    address = line.split()[-1]
    with httpx.Client(trust_env=False) as client:
        found = client.get(f"{address}api/runs")
        assert {run["id"] for run in found.json()} == {"first", "second"}
        with client.stream("GET", f"{address}api/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert next(stream.iter_text()) == "retry: 2000\n\n"
            process.send_signal(signal.SIGINT)
            process.wait(timeout=20)


def test_a_port_that_is_taken_is_one_sentence_and_the_usual_one_gives_way() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_a_search_has_members_and_its_groups_name_them(tmp_path: Path) -> None:
    make_run(tmp_path / "plain", steps=1)
    make_search(tmp_path / "search")
    client = TestClient(application(RunIndex.of([tmp_path])), base_url=LOCAL)
    assert {run["id"]: run["search"] for run in client.get("/api/runs").json()} == {
        "plain": False,
        "search": True,
    }
    population = client.get("/api/runs/search/population").json()
    assert [member["name"] for member in population["members"]] == [0, 1]
    assert client.get("/api/runs/plain/population").status_code == 404
    groups = client.get("/api/runs/search/steps/2").json()
    assert [group["population_member"] for group in groups] == [0, 0, 1, 1]
    assert "population_member" not in client.get("/api/runs/plain/steps/1").json()[0]
    assert client.get("/api/runs/search/steps/2/groups/3/members/1").status_code == 200
    (tmp_path / "search" / "evolution.json").write_text("{damaged")
    assert client.get("/api/runs/search/population").status_code == 404


def test_a_link_out_of_the_folder_is_no_population(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1)
    (tmp_path / "secret.json").write_text('{"members": []}')
    (tmp_path / "run" / "evolution.json").symlink_to(tmp_path / "secret.json")
    client = TestClient(application(RunIndex.of([tmp_path])), base_url=LOCAL)
    assert client.get("/api/runs/run/population").status_code == 404
