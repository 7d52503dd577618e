"""Two processes' knowledge bases that share KV: the same answers as alone, and removed documents leave the tier."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stillroom.backends.local import LocalBackend
from stillroom.config.settings import StillroomConfig
from stillroom.core.kv import OwnerTag
from stillroom.kvstore.files import KV_FOLDER
from stillroom.kvstore.owners import OwnerNote, note_owner
from stillroom.kvstore.shared.shared_tier import SharedTier
from stillroom.rag.stillroom import Stillroom
from tests.kvstore.shared.redis_server import needs_server, redis_server
from tests.kvstore.shared.tier_fixture import opened
from tests.rag.countries import ALWAYS, ask
from tests.server.fakes import until

pytestmark = pytest.mark.microworld


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    folder = tmp_path / "tier"
    folder.mkdir()
    return folder


def sharing(tier: Path) -> StillroomConfig:
    reuse = replace(ALWAYS.reuse, kv_tier=f"file://{tier}", kv_tier_timeout_s=60.0)
    return replace(ALWAYS, reuse=reuse)


def tier_of(stillroom: Stillroom) -> SharedTier:
    backend = stillroom._loader.backend
    assert isinstance(backend, LocalBackend) and backend.cache.tiers is not None
    assert backend.cache.tiers.shared is not None
    return backend.cache.tiers.shared


def records(tier: Path) -> int:
    return len(list(tier.rglob("*.kv")))


@pytest.fixture
def filled(docs: Path, tier: Path, tmp_path: Path) -> Iterator[Stillroom]:
    """A process whose answer about three documents is in the tier: a system prompt and three documents."""
    with Stillroom.open(tmp_path / "kb", config=sharing(tier)) as first:
        first.add(docs)
        ask(first)
        ask(first)
        until(lambda: tier_of(first).state.stats.num_written == 4)
        yield first


def test_another_knowledge_base_with_the_same_documents_uses_the_kv(
    filled: Stillroom, docs: Path, tier: Path, tmp_path: Path
) -> None:
    with Stillroom.open(tmp_path / "other", config=sharing(tier)) as second:
        second.add(docs)
        answer = ask(second)
        metrics = second.metrics.render().decode()
    with Stillroom.open(tmp_path / "alone", config=ALWAYS) as alone:
        alone.add(docs)
        expected = ask(alone)
    assert answer.token_ids == expected.token_ids
    question = answer.reuse.segments[-1].num_tokens
    assert answer.reuse.num_network_tokens == answer.reuse.num_prompt_tokens - question
    assert [segment.source for segment in answer.reuse.segments] == ["network"] * 4 + ["computed"]
    assert 'stillroom_kv_tier_records_total{event="read"} 4.0' in metrics
    assert "stillroom_kv_tier_usable 1.0" in metrics


def test_document_removed_by_another_process_leaves_the_tier(filled: Stillroom, docs: Path, tier: Path) -> None:
    """The server that follows the knowledge base notices while it is idle."""
    last = Path(ask(filled).sources[-1].document).name
    with Stillroom.open(filled._kb.path) as command:
        command.remove(str(docs / last))
    until(lambda: records(tier) == 3)


def test_document_removed_while_the_tier_is_away_leaves_it_later(
    filled: Stillroom, docs: Path, tier: Path, tmp_path: Path
) -> None:
    """Also if the process ended meanwhile: the knowledge base remembers what was removed."""
    last = Path(ask(filled).sources[-1].document).name
    tier.rename(tmp_path / "away")
    filled.remove(str(docs / last))
    until(lambda: tier_of(filled).state.num_to_forget == 1)
    filled.close()
    (tmp_path / "away").rename(tier)
    assert records(tier) == 4
    with Stillroom.open(tmp_path / "kb", config=sharing(tier)) as next_one:
        ask(next_one)
        until(lambda: records(tier) == 3)
        next_one.add(docs)
        for _ in range(2):
            ask(next_one)
        until(lambda: records(tier) == 4)


def test_tenant_that_is_gone_leaves_the_tier_at_the_next_start(filled: Stillroom, tier: Path, tmp_path: Path) -> None:
    filled.close()
    owner = OwnerTag(b"tenant-a")
    with opened(tier) as other_model:
        other_model.put(1, 10, owner=owner)
    assert records(tier) == 5
    note_owner(tmp_path / "kb" / KV_FOLDER, owner, OwnerNote("a", tmp_path / "deleted"))
    with Stillroom.open(tmp_path / "kb", config=sharing(tier)) as next_one:
        ask(next_one)
        until(lambda: records(tier) == 4)


QUESTIONS = ("What is the capital of Ardun ?", "What is the river of Corvia ?", "What is the capital of Ardun ?")


def ask_in_a_process(kb: Path, url: str, *questions: str) -> list[dict[str, Any]]:
    settings = {"STILLROOM_REUSE__LOAD": "always", "STILLROOM_REUSE__KV_TIER_KEY": "secret"}
    command = [sys.executable, "-m", "stillroom.cli.main", "ask", *questions, "--kb", str(kb), "--json"]
    command += ["--model", "bundled:microworld", "--kv-tier", url] if url else ["--model", "bundled:microworld"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | settings)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@needs_server
def test_two_processes_share_through_a_server(docs: Path, tmp_path: Path) -> None:
    for name in ("one", "two", "alone"):
        with Stillroom.open(tmp_path / name) as stillroom:
            stillroom.add(docs)
    with redis_server(tmp_path) as server:
        first = ask_in_a_process(tmp_path / "one", server.url, *QUESTIONS)
        second = ask_in_a_process(tmp_path / "two", server.url, *QUESTIONS)
    alone = ask_in_a_process(tmp_path / "alone", "", *QUESTIONS)
    assert [one["text"] for one in first] == [one["text"] for one in second] == [one["text"] for one in alone]
    assert first[0]["reuse"]["num_network_tokens"] == 0 < second[0]["reuse"]["num_network_tokens"]
