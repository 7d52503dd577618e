"""No id, name or error of the server contains one of its folders."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from filelock import FileLock

from stillroom.core.ids import public_id
from stillroom.errors import UsageError
from stillroom.rag.stillroom import Stillroom
from stillroom.server.error_replies import describe
from stillroom.server.privacy import served_name, without_folders
from tests.server.harness import serving
from tests.server.knowledge import PEOPLE, QUESTION

pytestmark = pytest.mark.microworld

ROUTE = "/v1/documents"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/srv/kb/manifest.json is missing", "manifest.json is missing"),
        ("another process is writing to /srv/kb: process 4 (add)", "another process is writing to kb: process 4 (add)"),
        ("make one with: stillroom add PATH --kb /srv/kb", "make one with: stillroom add PATH --kb kb"),
        ("'/srv/kb/a.md' and (/srv/kb/b.md)", "'a.md' and (b.md)"),
        ("GET /v1/documents lists what there is; and/or http://127.0.0.1:8321/readyz", None),
        ("name it notes/keys.md, not ./keys.md; <b>as written</b>", None),
    ],
)
def test_messages_contain_no_folders(message: str, shown: str | None) -> None:
    assert without_folders(message) == (message if shown is None else shown)
    _, body = describe(UsageError(message))
    assert body["error"]["message"] == (message if shown is None else shown)


def test_model_name_is_the_last_part_of_its_folder() -> None:
    assert served_name("/srv/models/qwen/") == "qwen"
    assert served_name("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


def test_replies_of_a_real_server_contain_no_folders(tmp_path: Path) -> None:
    outside = tmp_path / "outside" / "keys.md"
    outside.parent.mkdir()
    outside.write_text("# Keys\n\nRotate the keys twice a year.\n")
    replies: list[httpx.Response] = []
    with (
        Stillroom.open(tmp_path / "kb") as stillroom,
        serving(stillroom) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        stillroom.add(outside)

        def ask(method: str, path: str, **options: Any) -> httpx.Response:
            replies.append(client.request(method, path, **options))
            return replies[-1]

        files = [("file", ("a/b.txt", b"Bread bakes.")), ("file", ("bad.txt", b"\0"))]
        ask("POST", ROUTE, files=files)
        ask("POST", ROUTE, files=files, headers={"accept": "text/event-stream"})
        ask("GET", "/v1/models")
        first = ask("GET", ROUTE, params={"limit": 1}).json()
        second = ask("GET", ROUTE, params={"limit": 1, "after": first["last_id"]}).json()
        ids = [one["id"] for page in (first, second) for one in page["data"]]
        assert ids[0].startswith("files/") and ids[0].endswith("/keys.md") and ids[1] == "uploads/a/b.txt"
        found = ask("POST", "/v1/search", json={"query": "rotate keys"}).json()["results"]
        assert found[0]["document"] == ids[0]
        answer = ask("POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Rotate keys?"}]})
        assert answer.json()["stillroom"]["sources"][0]["document"] in ids
        ask("GET", f"/v1/requests/{answer.json()['stillroom']['request_id']}")
        with FileLock(tmp_path / "kb" / "write.lock"):
            assert ask("DELETE", f"{ROUTE}/{quote(ids[0])}").status_code == 503
        assert ask("GET", f"{ROUTE}/{quote(ids[0])}").json()["chunks"][0]["text"] == "Rotate the keys twice a year."
        for filter_, count in ((f"path ~ '{tmp_path}'", 0), (f"path = '{outside}'", 0), (f"path > '{tmp_path}'", 2)):
            found = ask("POST", "/v1/search", json={"query": "rotate keys", "where": filter_}).json()["results"]
            assert len(found) <= count, "`files/...` and `uploads/...` must sort in order"
        [shown] = ask("POST", "/v1/search", json={"query": "keys", "where": f"path = '{ids[0]}'"}).json()["results"]
        assert shown["document"] == ids[0]
        assert client.get(f"{ROUTE}/{quote(str(outside), safe='')}").status_code == 404
        assert client.delete(f"{ROUTE}/{quote(str(outside), safe='')}").status_code == 404
        assert ask("DELETE", f"{ROUTE}/{quote(ids[0])}").json()["num_documents"] == 1
    assert outside.exists()
    for reply in replies:
        assert str(tmp_path) not in reply.text and "outside" not in reply.text


def test_copies_and_hops_of_an_answer_and_its_record_contain_no_folders(tmp_path: Path) -> None:
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("people.md", "people-copy.md"):
        (folder / name).write_text(PEOPLE, encoding="utf-8")
    with Stillroom.open(tmp_path / "kb") as stillroom, serving(stillroom) as url:
        stillroom.add(folder)
        asked = {"messages": [{"role": "user", "content": QUESTION}], "stillroom": {"hops": 2, "top_k": 1}}
        reply = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
        answer = reply.json()["stillroom"]
        record = httpx.get(f"{url}/v1/requests/{answer['request_id']}", timeout=60)

    for found in (answer, record.json()):
        [copy] = found["sources"][0]["also_in"]
        names = {found["sources"][0]["document"], copy["document"]}
        assert names == {public_id(str(folder / name)) for name in ("people.md", "people-copy.md")}
        assert found["hops"][0]["sources"][0]["document"] in names
    assert "outside" not in reply.text + record.text
