"""`/v1/documents` with a fake Stillroom, and with a real knowledge base."""

import asyncio
import errno
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.datastructures import UploadFile

from stillroom.config.settings import ServerConfig, StillroomConfig
from stillroom.errors import KnowledgeBaseBusyError
from stillroom.rag.stillroom import Stillroom
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.uploaded_files import note_pending
from tests.server.fakes import FakeStillroom, as_stillroom, until
from tests.server.harness import events, serving

ROUTE = "/v1/documents"


def as_json(**texts: str) -> dict[str, list[dict[str, str]]]:
    return {"documents": [{"name": name.replace("_", "."), "text": text} for name, text in texts.items()]}


def test_form_files_and_json_texts_are_equivalent(client: httpx.Client, stillroom: FakeStillroom) -> None:
    form = client.post(ROUTE, files=[("file", ("a/b.md", b"one")), ("file", ("c.md", b"two"))])
    again = client.post(ROUTE, json={"documents": [{"name": "a/b.md", "text": "one"}, {"name": "c.md", "text": "2"}]})

    assert form.status_code == again.status_code == 200
    assert [(one["name"], one["status"]) for one in form.json()["data"]] == [("a/b.md", "added"), ("c.md", "added")]
    assert [one["status"] for one in again.json()["data"]] == ["unchanged", "updated"]
    [document] = form.json()["data"][0]["documents"]
    assert (document["id"], document["name"], document["num_chunks"]) == ("uploads/a/b.md", "a/b.md", 1)
    assert stillroom.texts["uploads/c.md"] == "2"


def test_unreadable_file_has_an_error_and_the_others_are_added(client: httpx.Client) -> None:
    response = client.post(ROUTE, json=as_json(good_md="good", bad_md="\0"))

    assert response.status_code == 200
    good, bad = response.json()["data"]
    assert (good["status"], bad["status"]) == ("added", "failed")
    assert bad["error"]["code"] == "document_unreadable" and bad["error"]["message"].startswith("bad.md: ")
    assert good["error"] is None


def test_upload_without_readable_files_is_422(client: httpx.Client) -> None:
    response = client.post(ROUTE, files={"file": ("bad.md", b"\0")})

    assert response.status_code == 422
    assert response.json()["error"]["code"] == "document_unreadable"
    assert response.json()["data"][0]["status"] == "failed"


def test_upload_progress_is_sent_as_events(client: httpx.Client) -> None:
    headers = {"accept": "text/event-stream"}

    response = client.post(ROUTE, json=as_json(a_md="one", b_md="two"), headers=headers)

    *progress, report, done = events(response)
    assert done == "[DONE]" and [one["object"] for one in progress] == ["documents.progress"] * 2
    assert progress[0]["current"] == "a.md" and set(progress[0]) >= {"num_files_done", "num_files_total"}
    assert [one["status"] for one in report["data"]] == ["added", "added"]


def test_upload_error_after_the_stream_began_is_an_event(
    client: httpx.Client, stillroom: FakeStillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise KnowledgeBaseBusyError("another process writes")

    monkeypatch.setattr(stillroom, "upload", busy)

    streamed = client.post(ROUTE, json=as_json(a_md="one"), headers={"accept": "text/event-stream"})
    plain = client.post(ROUTE, json=as_json(a_md="one"))

    assert events(streamed)[-1]["error"]["code"] == "knowledge_base_busy"
    assert (plain.status_code, plain.json()["error"]["code"]) == (503, "knowledge_base_busy")


def test_upload_failure_after_the_stream_began_is_logged(
    client: httpx.Client, stillroom: FakeStillroom, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(stillroom, "upload", broken)

    streamed = client.post(ROUTE, json=as_json(a_md="one"), headers={"accept": "text/event-stream"})

    assert events(streamed)[-1]["error"]["code"] == "internal_error"
    [record] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert record.exc_info and "a bug" in str(record.exc_info[1])


def test_waiting_uploads_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload beyond the budget is refused before it is read."""
    stillroom = FakeStillroom(config=StillroomConfig(server=ServerConfig(max_upload_bytes=1000)))
    go_on, upload = threading.Event(), stillroom.upload

    def slow(*arguments: Any) -> Any:
        assert go_on.wait(20)
        return upload(*arguments)

    monkeypatch.setattr(stillroom, "upload", slow)
    content = json.dumps(as_json(a_md="x" * 800)).encode()
    bodies: list[Any] = [content, iter([b"of any length"])]
    kind = {"content-type": "application/json"}
    streamed = kind | {"accept": "text/event-stream"}
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url, timeout=20) as client:
        for _ in range(3):
            assert client.post(ROUTE, content=b"{" * 900, headers=kind).status_code == 400, (
                "a refused upload must free its budget"
            )
        with (
            client.stream("POST", ROUTE, content=content, headers=streamed) as first,
            client.stream("POST", ROUTE, content=content, headers=streamed) as second,
        ):
            refused = [client.post(ROUTE, content=body, headers=kind) for body in bodies]
            go_on.set()
            for one in (first, second):
                one.read()
                assert events(one)[-1] == "[DONE]"
        assert client.post(ROUTE, content=iter([content]), headers=kind).status_code == 200
        assert b'reason="queue"} 2' in stillroom.metrics.render()
    for one in refused:
        assert (one.status_code, one.json()["error"]["code"]) == (429, "queue_full")
        assert int(one.headers["retry-after"]) > 0


def test_cancelled_upload_counts_as_running_until_its_step_ends() -> None:
    stillroom = FakeStillroom(config=StillroomConfig(server=ServerConfig(max_concurrent=1)))
    begun, go_on, upload = threading.Event(), threading.Event(), stillroom.upload

    def slow(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return upload(*given)

    stillroom.upload = slow  # type: ignore[method-assign, assignment]
    streamed = {"accept": "text/event-stream"}
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url, timeout=20) as client:
        with client.stream("POST", ROUTE, json=as_json(a_md="a"), headers=streamed) as response:
            assert response.status_code == 200
            assert begun.wait(20), "an upload that has not begun is cancelled at once"
        until(lambda: 'path="/v1/documents",status="200"} 1' in client.get("/metrics").text)
        refused = client.post(ROUTE, json=as_json(a_md="a"))
        go_on.set()
        until(lambda: client.post(ROUTE, json=as_json(a_md="a")).status_code == 200)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")


def test_waiting_changes_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillroom.server.routes.upload_queue.MAX_CHANGES", 2)
    stillroom, go_on = FakeStillroom(), threading.Event()
    discard = stillroom.discard
    stillroom.discard = lambda name: (go_on.wait(20), discard(name))[1]  # type: ignore[method-assign]
    with (
        serving(as_stillroom(stillroom)) as url,
        httpx.Client(base_url=url, timeout=20) as client,
        ThreadPoolExecutor(9) as pool,
    ):
        deletions = [pool.submit(client.delete, f"{ROUTE}/none.md") for _ in range(9)]
        until(lambda: sum(one.done() for one in deletions) == 7)
        assert client.post(ROUTE, json=as_json(a_md="a")).json()["error"]["code"] == "queue_full"
        go_on.set()
        assert sorted(one.result().status_code for one in deletions) == [404] * 2 + [429] * 7


def test_form_that_cannot_be_stored_is_507(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UploadFile, "write", full)

    response = client.post(ROUTE, files={"file": ("a.md", b"a")})

    assert (response.status_code, response.json()["error"]["code"]) == (507, "storage_failed")
    assert "full or failing" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["../a.md", "/etc/passwd", ".env", "a/../b", "a\\b", "a#1", ""])
@pytest.mark.parametrize("is_form", [True, False])
def test_invalid_upload_names_are_400_and_nothing_is_stored(
    client: httpx.Client, stillroom: FakeStillroom, name: str, is_form: bool
) -> None:
    known = set(stillroom.texts)
    if is_form:
        response = client.post(ROUTE, files=[("file", ("good.md", b"good")), ("file", (name or " ", b"bad"))])
    else:
        response = client.post(ROUTE, json={"documents": [{"name": name, "text": ""}]})

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert set(stillroom.texts) == known


@pytest.mark.parametrize(
    ("request_body", "status"),
    [
        ({"json": {}}, 400),
        ({"json": {"documents": []}}, 400),
        ({"json": {"documents": [{"name": "a.md"}]}}, 400),
        ({"json": {"documents": [{"name": "a.md", "text": "", "titel": ""}]}}, 400),
        ({"json": {"documents": [{"name": f"{n}.md", "text": ""} for n in range(1001)]}}, 400),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415),
        ({"content": b"x"}, 415),
        ({"data": {"file": "text"}}, 415),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400),
        ({"files": {"picture": ("a.md", b"")}}, 400),
        ({"files": {"file": ("a.md", b"")}, "data": {"title": "x"}}, 400),
        ({"files": {"file": ("a.md", b"")}, "data": {"metadata": "[]"}}, 400),
        ({"files": {"file": ("a.md", b"")}, "data": {"metadata": "{"}}, 400),
        ({"files": {"metadata": ("a.md", b"{}")}}, 400),
        ({"json": {"documents": [{"name": "a.md", "text": ""}], "metadata": []}}, 400),
    ],
)
def test_invalid_uploads_are_refused(any_client: httpx.Client, request_body: dict[str, object], status: int) -> None:
    response = any_client.post(ROUTE, **request_body)  # type: ignore[arg-type]

    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_document_list_has_pages(client: httpx.Client, stillroom: FakeStillroom) -> None:
    stillroom.texts = {f"{name}.md": name for name in "abcde"}
    seen: list[str] = []
    page: dict[str, Any] = {"has_more": True, "last_id": ""}
    while page["has_more"]:
        page = client.get(ROUTE, params={"limit": 2, "after": str(page["last_id"])}).json()
        seen += [one["id"] for one in page["data"]]
        assert len(page["data"]) <= 2
    assert seen == sorted(stillroom.texts)

    stillroom.texts = {}
    assert client.get(ROUTE).json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


@pytest.mark.parametrize("params", [{"limit": 0}, {"limit": 1001}, {"limit": "many"}])
def test_invalid_page_parameters_are_400(any_client: httpx.Client, params: dict[str, str]) -> None:
    response = any_client.get(ROUTE, params=params)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")
    assert any_client.get(f"{ROUTE}/docs/keys.md", params=params).json()["error"]["param"] == "limit"


def test_document_is_found_and_deleted_by_id_or_name(client: httpx.Client, stillroom: FakeStillroom) -> None:
    client.post(ROUTE, json=as_json(a_md="one"))

    got = client.get(f"{ROUTE}/uploads/a.md").json()
    assert got == client.get(f"{ROUTE}/a.md").json()
    assert [chunk["text"] for chunk in got["chunks"]] == ["one"]

    deleted = client.delete(f"{ROUTE}/a.md")
    assert deleted.json() == {
        "id": "a.md",
        "object": "document.deleted",
        "deleted": True,
        "num_documents": 1,
        "num_chunks": 1,
    }
    for response in (client.delete(f"{ROUTE}/a.md"), client.get(f"{ROUTE}/a.md")):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "document_not_found")


def test_a_real_knowledge_base_from_upload_to_deletion(tmp_path: Path) -> None:
    with (
        Stillroom.open(tmp_path / "kb") as stillroom,
        serving(stillroom) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        files = {"file": ("notes/keys.md", b"# Keys\n\nRotate keys twice a year.\n")}
        uploaded = client.post(ROUTE, files=files, data={"metadata": '{"team": "legal"}'})
        [document] = uploaded.json()["data"][0]["documents"]
        assert document["metadata"] == {"team": "legal"}
        [found] = client.post("/v1/search", json={"query": "rotate keys"}).json()["results"]
        assert found["document"] == document["id"] == "uploads/notes/keys.md"

        path = f"{ROUTE}/{quote(document['id'], safe='')}"
        assert client.get(path).json()["chunks"][0]["text"] == "Rotate keys twice a year."

        long = "\n\n".join(f"# Part {part}\n\nOf part {part}." for part in range(7))
        client.post(ROUTE, json=as_json(long_md=long))
        parts: list[str] = []
        page: dict[str, Any] = {"has_more": True}
        while page["has_more"]:
            page = client.get(f"{ROUTE}/long.md", params={"limit": 3, "offset": len(parts)}).json()
            parts += [chunk["text"] for chunk in page["chunks"]]
            assert page["num_chunks"] == 7 and len(page["chunks"]) in (1, 3)
        assert parts == [f"Of part {part}." for part in range(7)]
        assert client.delete(f"{ROUTE}/long.md").status_code == 200

        async def at_once() -> list[int]:
            async with httpx.AsyncClient(base_url=url, timeout=60) as many:
                posts = (many.post(ROUTE, json=as_json(**{f"{n}_txt": f"number {n}"})) for n in range(4))
                return [response.status_code for response in await asyncio.gather(*posts)]

        assert asyncio.run(at_once()) == [200] * 4, "uploads must run one after the other"
        assert client.get(ROUTE).json()["data"][0]["name"] == "0.txt"
        assert client.delete(path).json()["num_documents"] == 1
        assert client.post("/v1/search", json={"query": "rotate keys"}).json()["results"][0]["document"].endswith("txt")
        assert not (tmp_path / "kb/uploads/notes").exists()


def test_interrupted_uploads_are_listed_deletable_and_completed_at_start(tmp_path: Path) -> None:
    kb = KnowledgeBase.open(tmp_path / "kb", StillroomConfig(), create=True)
    texts = {"lone.md": b"A file without an upload record.", "begun.md": b"# Keys\n\nRotate keys."}
    (kb.path / "uploads").mkdir()
    for name, text in texts.items():
        (kb.path / "uploads" / name).write_bytes(text)
    with kb.writing("upload"):
        note_pending(kb.corpus, ["uploads/begun.md"], {"team": "legal"})
    kb.close()
    with (
        Stillroom.open(tmp_path / "kb") as stillroom,
        serving(stillroom) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):

        def listed() -> dict[str, str]:
            found: dict[str, str] = {}
            page: dict[str, Any] = {"has_more": True, "last_id": ""}
            while page["has_more"]:
                page = client.get(ROUTE, params={"limit": 1, "after": page["last_id"]}).json()
                found |= {one["id"]: one["status"] for one in page["data"]}
            return found

        until(lambda: listed() == {"uploads/begun.md": "indexed", "uploads/lone.md": "not_indexed"})
        shown = client.get(f"{ROUTE}/lone.md").json()
        assert (shown["status"], shown["chunks"], shown["num_bytes"]) == ("not_indexed", [], len(texts["lone.md"]))
        assert client.delete(f"{ROUTE}/uploads/lone.md").json()["num_documents"] == 0
        assert listed() == {"uploads/begun.md": "indexed"}
        assert client.get(f"{ROUTE}/begun.md").json()["metadata"] == {"team": "legal"}


def test_repeated_deletion_deletes_no_upload_of_that_name(tmp_path: Path) -> None:
    with (
        Stillroom.open(tmp_path / "kb") as stillroom,
        serving(stillroom) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for name in ("k.md", "uploads/k.md"):
            client.post("/v1/documents", json={"documents": [{"name": name, "text": f"The key of {name}."}]})
        assert [client.delete("/v1/documents/uploads/k.md").status_code for _ in range(2)] == [200, 404]
        assert [one["id"] for one in client.get("/v1/documents").json()["data"]] == ["uploads/uploads/k.md"]
