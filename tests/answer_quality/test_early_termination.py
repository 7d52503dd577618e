"""Tests Cache-Craft's early termination against a pass without the tokens that it ends."""

from collections.abc import Sequence

import pytest
import torch

from stillroom.answer_quality.early_termination import TerminatingModel, Termination
from stillroom.core.ids import ChunkId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.models.bundled_models import MICROWORLD
from stillroom.models.causal_model import CausalModel
from stillroom.models.loader import load_model
from stillroom.models.packed import PackedInput
from stillroom.ops.attention import AttentionSpan

SYSTEM, CHUNK, NUM_CHUNKS, QUESTION = 8, 12, 4, 6
FIRST_OF_QUESTION = SYSTEM + NUM_CHUNKS * CHUNK
NUM_TOKENS = FIRST_OF_QUESTION + QUESTION
CHOSEN = [place for place in range(SYSTEM, FIRST_OF_QUESTION) if place % 3]

KV = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return load_model(MICROWORLD, device="cpu", dtype="float32").decoder


@pytest.fixture(scope="module")
def prompt() -> SegmentedPrompt:
    ids = torch.randint(8, 900, (NUM_TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
    segments = [Segment(SegmentKind.SYSTEM, tuple(ids[:SYSTEM]))]
    for number in range(NUM_CHUNKS):
        start = SYSTEM + number * CHUNK
        segments.append(Segment(SegmentKind.CHUNK, tuple(ids[start : start + CHUNK]), ChunkId(number)))
    return SegmentedPrompt((*segments, Segment(SegmentKind.QUESTION, tuple(ids[FIRST_OF_QUESTION:]))))


def old_kv(model: CausalModel) -> KV:
    """Return KV of another context for all slots: random, from one seed."""
    draw = torch.Generator().manual_seed(7)
    shape = (NUM_TOKENS, model.spec.num_kv_heads, model.spec.head_dim)
    return [
        (torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)) for _ in range(model.spec.num_layers)
    ]


def run(model: CausalModel, prompt: SegmentedPrompt, places: Sequence[int], kv: KV) -> torch.Tensor:
    """Compute the tokens at these places over the given KV, and return the last hidden state."""
    ids = torch.tensor([token for segment in prompt.segments for token in segment.token_ids])
    chosen = torch.tensor(places)
    span = AttentionSpan(0, len(places), slice(0, NUM_TOKENS), NUM_TOKENS, chosen)
    return model.hidden_states(
        PackedInput(ids[chosen], chosen, chosen, [span], [len(places) - 1]), lambda layer: kv[layer]
    )


def test_answer_is_that_of_a_pass_without_the_ended_tokens(model: CausalModel, prompt: SegmentedPrompt) -> None:
    """The twin finds in the first layers what the ended tokens wrote, and old KV in the others, and computes the
    rest."""
    question = list(range(FIRST_OF_QUESTION, NUM_TOKENS))
    kv, terminating = old_kv(model), TerminatingModel(model)
    terminating.expect(prompt, window=2)
    found = run(terminating, prompt, CHOSEN + question, kv)
    ended = terminating.termination
    assert ended is not None and 2 <= ended.layer < model.spec.num_layers and 0 < ended.num_ended < len(CHOSEN)

    untouched = old_kv(model)
    is_old = [(kv[-1][1][place] == untouched[-1][1][place]).all() for place in CHOSEN]
    at_end = [place for place, is_kept in zip(CHOSEN, is_old, strict=True) if is_kept]
    assert len(at_end) == ended.num_ended
    assert {(place - SYSTEM) // CHUNK for place in at_end}.isdisjoint(
        (place - SYSTEM) // CHUNK for place in CHOSEN if place not in at_end
    ), "whole chunks end"

    full, twin = old_kv(model), old_kv(model)
    run(model, prompt, CHOSEN + question, full)
    for layer in range(ended.layer):
        for written, computed in zip(twin[layer], full[layer], strict=True):
            written[at_end] = computed[at_end]
    wanted = run(model, prompt, [place for place in CHOSEN if place not in at_end] + question, twin)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(kv, twin, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def last(terminating: TerminatingModel) -> Termination | None:
    return terminating.termination


def test_nothing_ends_where_no_layers_agree_or_no_prompt_is_expected(
    model: CausalModel, prompt: SegmentedPrompt
) -> None:
    places = CHOSEN + list(range(FIRST_OF_QUESTION, NUM_TOKENS))
    wanted, terminating = run(model, prompt, places, old_kv(model)), TerminatingModel(model)
    assert torch.equal(run(terminating, prompt, places, old_kv(model)), wanted) and last(terminating) is None

    num_layers = model.spec.num_layers
    terminating.expect(prompt, window=num_layers + 1)
    torch.testing.assert_close(run(terminating, prompt, places, old_kv(model)), wanted)
    assert last(terminating) == Termination(num_layers, 0, num_layers)
    terminating.expect(None)
    assert torch.equal(run(terminating, prompt, places, old_kv(model)), wanted) and last(terminating) is None


def test_token_in_some_layers_counts_in_proportion() -> None:
    assert Termination(layer=2, num_ended=9, num_layers=6).saved_tokens == 6.0
