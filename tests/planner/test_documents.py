"""Windows of documents that a plan prepares: order, bytes, seconds, and what a budget pays for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config.settings import PrepareConfig
from stillroom.core.ids import DocumentId
from stillroom.kvstore.files import size_on_disk
from stillroom.planner.documents import PlannedDocuments, PreparedDocuments, all_windows, first_chunks, within
from stillroom.rag.document_demand import DocumentDemand
from tests.planner.made import FRAME, PLANT, make_inputs, with_documents

FOUR = with_documents(make_inputs(), [[15]]).documents
"""Four documents of four chunks of 16 tokens."""
PLENTY = replace(PLANT, device_bytes=10_000)


def windows(documents: PlannedDocuments = FOUR, *, demand: tuple[str, ...] = (), tokens: int = 0) -> PreparedDocuments:
    """All windows, with documents in demand given most wanted first."""
    counted = DocumentDemand()
    for times, name in enumerate(reversed(demand), start=1):
        for _ in range(times):
            counted.add([DocumentId(name)])
    return all_windows(documents, counted, PLENTY, PrepareConfig(window_tokens=tokens, overlap=0.5))


def test_documents_in_demand_come_first_then_the_newest() -> None:
    order = [sorted(prompt.prepares)[0] // 4 for prompt in windows(demand=("d1", "d0")).prompts]
    assert order == [1, 0, 3, 2]


def test_window_equals_a_worked_example() -> None:
    """Room for 18 + 3 * 16 tokens: the second window computes a chunk of the first one again."""
    first, second, *_ = windows(tokens=18 + 48).windows
    assert first.prompt is not None and second.prompt is not None
    assert sorted(first.prompt.prepares) == [12, 13, 14] and sorted(second.prompt.prepares) == [15]
    assert second.prompt.prompt.chunk_ids == (14, 15)
    # 10 ms for the step and 1 ms for each chunk's and the question's tokens; the system message is kept
    assert first.seconds == pytest.approx(0.01 + 0.001 * (48 + 2))
    assert second.seconds == pytest.approx(0.01 + 0.001 * (32 + 2))
    assert first.num_bytes == sum(size_on_disk(16, num_seen) for num_seen in (1, 2, 3))
    assert (first.num_chunks, second.num_chunks) == (3, 1)


def test_document_that_was_not_read_counts_as_the_mean_of_the_others() -> None:
    unread = replace(FOUR.documents[3], chunks=None, info=replace(FOUR.documents[3].info, num_chunks=8))
    read, found = windows(), windows(replace(FOUR, documents=(*FOUR.documents[:3], unread)))
    assert found.windows[0].prompt is None, "the newest comes first"
    assert found.windows[0].num_bytes == 2 * read.windows[0].num_bytes
    assert found.windows[0].seconds == pytest.approx(2 * read.windows[0].seconds)
    assert found.num_chunks == 20 and len(found.prompts) == 3
    part = first_chunks(found, 4, PLENTY, PrepareConfig())
    assert part.num_bytes == read.windows[0].num_bytes and not part.chunk_ids


def test_chunk_longer_than_a_window_is_not_prepared() -> None:
    assert windows(tokens=18 + 15).windows == ()


@given(st.integers(0, 20), st.sampled_from([0, 18 + 16, 18 + 48]))
def test_first_chunks_are_exactly_as_many_in_the_same_order(num_chunks: int, tokens: int) -> None:
    every = windows(tokens=tokens)
    found = first_chunks(every, num_chunks, PLENTY, PrepareConfig())
    assert found.num_chunks == len(found.chunk_ids) == min(num_chunks, 16)
    whole = len(found.windows) - 1
    assert found.windows[: max(0, whole)] == every.windows[: max(0, whole)]
    assert found.num_bytes <= every.num_bytes and found.seconds <= every.seconds + 1e-9


@given(st.integers(0, 20 * size_on_disk(16)))
def test_budget_pays_for_the_first_windows_that_fit(num_bytes: int) -> None:
    every = windows(tokens=18 + 48)
    found = within(every, num_bytes)
    assert found.windows == every.windows[: len(found.windows)] and found.num_bytes <= num_bytes
    rest = every.windows[len(found.windows) :]
    assert not rest or found.num_bytes + rest[0].num_bytes > num_bytes


def test_windows_end_with_the_prompts_that_were_computed() -> None:
    every = windows()
    assert every.first(4) is every
    assert every.first(1).windows == every.windows[:1] and not every.first(0).windows
    assert FRAME.num_tokens == 18
