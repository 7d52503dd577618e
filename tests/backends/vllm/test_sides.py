"""Both sides of the vLLM connector on a paged cache: other servers load what one has saved, and nothing else."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from stillroom.backends.vllm.computing_side import ComputingSide
from stillroom.errors import ConfigError
from stillroom.kvstore.record import Defect
from stillroom.kvstore.shared.folder_records import FolderRecords
from tests.backends.vllm.paged_server import BLOCK, MODEL, NUM_BLOCKS, PagedServer, request_of
from tests.fakes import ManualClock

PROMPT = list(range(100, 130))
"""30 tokens: three pieces of 8, and six tokens in none."""
Servers = Callable[..., PagedServer]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    return tmp_path / "tier"


@pytest.fixture
def server(folder: Path) -> Iterator[Servers]:
    with ExitStack() as stack:

        def made(**options: Any) -> PagedServer:
            one = PagedServer(f"file://{folder}", ManualClock(), **options)
            stack.callback(one.close)
            return one

        yield made


def records(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_other_server_loads_whole_pieces(server: Servers, folder: Path) -> None:
    one, other = server(), server()
    assert one.serve(request_of("a", PROMPT)) == 0 and len(records(folder)) == 3
    assert other.serve(request_of("b", PROMPT)) == 24
    assert other.serve(request_of("c", [*PROMPT[:20], 1, 2, 3, 4, 5])) == 16, "as far as the prompts are equal"
    assert other.serve(request_of("d", PROMPT[:17])) == 16
    assert other.serve(request_of("e", PROMPT[:16])) == 8, "one token is left to compute"
    assert other.serve(request_of("f", [0, *PROMPT])) == 0, "another place"


def test_tokens_in_the_servers_own_cache_are_not_loaded(server: Servers) -> None:
    one, other = server(), server()
    one.serve(request_of("a", PROMPT))
    assert other.serve(request_of("b", PROMPT), num_local=8) == 16
    assert other.serve(request_of("c", PROMPT), num_local=12) == 12, "half of a piece"
    assert other.serve(request_of("d", PROMPT), num_local=24) == 0


def test_salts_and_models_never_meet(server: Servers) -> None:
    one, other = server(), server(fingerprint=bytes(32))
    one.serve(request_of("a", PROMPT, "tenant 1"))
    assert one.serve(request_of("b", PROMPT, "tenant 2")) == one.serve(request_of("c", PROMPT)) == 0
    assert one.serve(request_of("d", PROMPT, "tenant 1")) == 24
    assert other.serve(request_of("e", PROMPT, "tenant 1")) == 0


def test_pieces_are_saved_at_their_second_use(server: Servers, folder: Path) -> None:
    one = server(save_at_use=2)
    one.serve(request_of("a", PROMPT))
    assert not records(folder)
    one.serve(request_of("b", [*PROMPT[:20], 1, 2, 3, 4, 5]))
    assert len(records(folder)) == 2, "the pieces that both prompts begin with"
    blocks = one.begin(request_of("c", PROMPT))
    assert one.end(request_of("c", PROMPT, num_computed_tokens=30), blocks) and len(records(folder)) == 3
    assert not one.end(request_of("d", PROMPT, num_computed_tokens=30), one.begin(request_of("d", PROMPT)))


def test_removed_records_are_saved_again(server: Servers, folder: Path) -> None:
    one = server()
    one.serve(request_of("a", PROMPT))
    for path in records(folder)[1:]:
        path.unlink()
    one.serve(request_of("b", PROMPT))
    assert len(records(folder)) == 3


def test_damaged_record_ends_what_is_loaded(server: Servers, folder: Path) -> None:
    """Any byte of any record may be damaged: no KV of another prompt is ever used."""
    rng, one, other = random.Random(0), server(), server()
    assert other.reading is not None
    for number in range(24):
        tokens = [number, *PROMPT]
        one.serve(request_of(f"one {number}", tokens))
        path = rng.choice(records(folder))
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        assert other.serve(request_of(f"other {number}", tokens)) in (0, 8, 16)
        assert sum(other.reading.state.defects.values()) == number + 1
        for path in records(folder):
            path.unlink()


def test_forged_records_are_refused(folder: Path, server: Servers) -> None:
    one, other = server(settings={"kv_tier_key": "a"}), server(settings={"kv_tier_key": "b"})
    one.serve(request_of("a", PROMPT))
    there = {path.name: path for path in records(folder)}
    other.serve(request_of("b", PROMPT))
    for path in records(folder):
        if there[path.name] != path:
            path.write_bytes(there[path.name].read_bytes())
    third = server(settings={"kv_tier_key": "b"})
    assert third.serve(request_of("c", PROMPT)) == 0
    assert third.reading is not None and third.reading.state.defects[Defect.SIGNATURE] > 0


def test_requests_that_depend_on_more_than_tokens_share_nothing(server: Servers, folder: Path) -> None:
    one = server()
    more: dict[str, Any] = {
        "mm_features": ["image"],
        "lora_request": "adapter",
        "prompt_embeds": "embeddings",
        "pooling_params": "pooling",
        "resumable": True,
    }
    for name, value in more.items():
        one.serve(request_of(name, PROMPT, **{name: value}))
    assert not records(folder)
    one.serve(request_of("plain", PROMPT))
    for name, value in more.items():
        assert one.serve(request_of(name, PROMPT, **{name: value})) == 0
    assert one.serve(request_of("skips", PROMPT, skip_reading_prefix_cache=True)) == 0


def test_only_computed_tokens_of_a_cancelled_request_are_saved(server: Servers, folder: Path) -> None:
    one = server()
    request = request_of("a", PROMPT)
    blocks = one.begin(request)
    request.num_computed_tokens, request.num_in_flight_tokens = 20, 8
    assert one.end(request, blocks) and len(records(folder)) == 1
    waiting = request_of("b", PROMPT)
    one.scheduling.num_matched(waiting, 0)
    assert not one.scheduling.finished(waiting, []), "cancelled while it waited for the tier"
    assert one.reading is not None and one.reading.settle() and one.serve(request_of("c", PROMPT)) == 8


def test_blocks_that_vllm_evicts_while_a_request_waits_are_loaded(server: Servers) -> None:
    one, other = server(), server()
    one.serve(request_of("a", PROMPT))
    request = request_of("b", PROMPT)
    assert other.poll(request, 16) == 8
    assert other.poll(request, 0) == 24, "vLLM could not allocate, and has evicted the first two pieces since"
    other.serve(request)


def test_request_waits_no_longer_than_allowed(server: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = server(), server()
    one.serve(request_of("a", PROMPT))
    clock, replies = other.clock, threading.Event()
    assert isinstance(clock, ManualClock)
    present = FolderRecords.num_present
    monkeypatch.setattr(FolderRecords, "num_present", lambda self, keys: present(self, keys) if replies.wait(60) else 0)
    request = request_of("b", PROMPT)
    assert other.scheduling.num_matched(request, 0) is None
    clock.advance(59.0)
    assert other.scheduling.num_matched(request, 0) is None
    clock.advance(2.0)
    assert other.scheduling.num_matched(request, 0) == 0
    replies.set()
    other.scheduling.allocated(request, [], 0)
    assert not other.scheduling.step().loads


def test_tier_that_is_gone_is_a_miss(server: Servers, folder: Path) -> None:
    one = server()
    one.serve(request_of("a", PROMPT))
    folder.rename(folder.with_name("away"))
    for name in "bcdefgh":
        assert one.serve(request_of(name, PROMPT)) == 0
    assert one.reading is not None and not one.reading.is_usable


def test_kv_that_is_not_finite_is_not_saved(server: Servers, folder: Path) -> None:
    one = server()
    request = request_of("a", PROMPT)
    blocks = one.begin(request)
    one.layers["layer 1"][blocks[2], 0, 1, 3] = float("nan")
    assert one.end(request, blocks) and len(records(folder)) == 2, "all pieces but the second"
    assert one.serve(request_of("b", PROMPT)) == 8


def test_connector_that_was_stopped_does_nothing(server: Servers, folder: Path) -> None:
    one = server()
    one.serve(request_of("a", PROMPT))
    one.scheduling.stop()
    assert one.serve(request_of("b", PROMPT)) == 0
    assert one.serve(request_of("c", PROMPT[::-1])) == 0 and len(records(folder)) == 3


def test_cache_with_other_blocks_is_refused(server: Servers) -> None:
    one = server()
    layer = torch.zeros(2 * NUM_BLOCKS, 2, BLOCK, 6)
    assert one.writing is not None
    with pytest.raises(ConfigError, match="128 blocks and vLLM's scheduler 64"):
        ComputingSide({"layer": layer}, NUM_BLOCKS, MODEL, one.writing)


def test_random_traffic_of_two_servers_uses_no_other_kv(server: Servers, folder: Path) -> None:
    """Prompts that share prefixes, salts, own caches and lost records; every token's KV is checked."""
    rng = random.Random(1)
    servers = [server(save_at_use=1), server(save_at_use=2)]
    stems = [[rng.randrange(50) for _ in range(24)] for _ in range(3)]
    num_loaded = 0
    for number in range(150):
        stem = rng.choice(stems)[: rng.randrange(25)]
        tokens = [*stem, *(rng.randrange(50) for _ in range(rng.randrange(1, 12)))]
        num_local = BLOCK * rng.randrange((len(tokens) - 1) // BLOCK + 1) if rng.random() < 0.3 else 0
        request = request_of(str(number), tokens, rng.choice([None, "salt"]))
        num_loaded += rng.choice(servers).serve(request, num_local)
        if rng.random() < 0.1 and (kept := records(folder)):
            rng.choice(kept).unlink()
    assert num_loaded > 300
