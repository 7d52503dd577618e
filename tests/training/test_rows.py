"""Tests examples as rows of tokens: the prompt format and the attention masks."""

import random
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.models.tokenizer import Tokenizer
from training.data import rows
from training.data.collection import Library
from training.data.rows import NO_TARGET, Batches, Renderer, Sample
from training.data.spans import occurs
from training.data.tasks import Example, Mixture, compose, vary
from training.data.worlds import SILENT
from training.isolation import attend, block_mask, dense_mask

MIXTURE = Mixture(ramp=0.0)


@pytest.fixture(scope="module")
def library(small_data: Path) -> Library:
    return Library.read(small_data, "train")


@pytest.fixture(scope="module")
def tokenizer(small_data: Path) -> Tokenizer:
    return Tokenizer.load(small_data / "tokenizer")


def batches(library: Library, tokenizer: Tokenizer, seed: int = 0) -> Batches:
    return Batches(
        library=library,
        renderer=Renderer(tokenizer),
        mixture=MIXTURE,
        num_rows=3,
        row_tokens=1024,
        num_steps=10,
        seed=seed,
    )


def examples(library: Library, count: int) -> list[Example]:
    return [compose(library, MIXTURE, random.Random(number), 1.0) for number in range(count)]


def test_examples_have_answers_in_their_chunks_or_none(library: Library) -> None:
    sizes, kinds = set(), set()
    for example in examples(library, 150):
        texts = [chunk.text for chunk in example.chunks]
        sizes.add(len(texts))
        for branch in example.branches:
            kinds.add(branch.kind)
            is_told = any(occurs(branch.answer, text) for text in texts)
            assert is_told == (branch.answer != SILENT), branch
            assert (branch.kind == "unanswerable") == (branch.answer == SILENT)
    assert sizes == {1, 2, 3, 4, 5, 6}
    assert kinds >= {"asked", "cloze", "who", "when", "single", "split", "unanswerable"}


def test_swapped_answer_is_replaced_in_the_text_too(library: Library) -> None:
    known = {text for passage in library.passages for text in (passage.text,)}
    always = Mixture(ramp=0.0, worlds=0.0, swapped=1.0)
    changed = 0
    for number in range(60):
        example = compose(library, always, random.Random(number), 1.0)
        changed += any(chunk.text not in known for chunk in example.chunks)
        for branch in example.branches:
            assert branch.answer == SILENT or any(occurs(branch.answer, chunk.text) for chunk in example.chunks)
    assert changed > 30


def test_the_number_of_chunks_grows_with_the_run(library: Library) -> None:
    slow = Mixture(ramp=1.0, worlds=0.0)
    early = {len(compose(library, slow, random.Random(n), 0.0).chunks) for n in range(40)}
    late = {len(compose(library, slow, random.Random(n), 1.0).chunks) for n in range(80)}
    assert early == {1} and max(late) == 6


def test_varied_questions_keep_their_words() -> None:
    found = {vary("Where is Ada born?", random.Random(n)) for n in range(30)}
    assert found == {"Where is Ada born?", "where is Ada born"}


def branch_tokens(sample: Sample, number: int) -> list[int]:
    chosen = (sample.branches == 0) | (sample.branches == number)
    order = np.argsort(sample.positions[chosen], kind="stable")
    return [int(token) for token in sample.tokens[chosen][order]]


def test_context_and_branch_equal_the_engine_prompt_and_the_answer(library: Library, tokenizer: Tokenizer) -> None:
    builder = PromptBuilder(tokenizer, format_for(tokenizer))
    renderer = Renderer(tokenizer)
    stop = tokenizer.encode_template("<|im_end|>")
    for example in examples(library, 12):
        sample = renderer.render(example, 4096)
        assert sample is not None and len(sample.kinds) == len(example.branches)
        for number, branch in enumerate(example.branches, start=1):
            prompt = builder.build(example.chunks, branch.question, None).token_ids
            assert branch_tokens(sample, number) == [*prompt, *tokenizer.encode_text(branch.answer), *stop]
            own = sample.branches == number
            told = sample.targets[own & sample.is_answer]
            assert list(told) == [*tokenizer.encode_text(branch.answer), *stop]


def test_branches_that_do_not_fit_are_dropped(library: Library, tokenizer: Tokenizer) -> None:
    example = next(one for one in examples(library, 50) if len(one.branches) > 4)
    renderer = Renderer(tokenizer)
    whole = renderer.render(example, 4096)
    assert whole is not None
    cut = renderer.render(example, len(whole) - 1)
    assert cut is not None and len(cut.kinds) < len(whole.kinds) and len(cut) < len(whole)
    assert renderer.render(example, int((whole.branches == 0).sum())) is None


def test_batch_depends_only_on_its_number(library: Library, tokenizer: Tokenizer) -> None:
    one, again, other = (batches(library, tokenizer).batch(number) for number in (4, 4, 5))
    assert np.array_equal(one.tokens, again.tokens) and np.array_equal(one.targets, again.targets)
    assert not np.array_equal(one.tokens, other.tokens)
    assert not np.array_equal(one.tokens, batches(library, tokenizer, seed=1).batch(4).tokens)


def test_rows_are_full_and_every_target_is_the_next_token_of_its_part(library: Library, tokenizer: Tokenizer) -> None:
    batch = batches(library, tokenizer).batch(2)
    assert (batch.samples > 0).mean() > 0.95
    assert sum(batch.kinds.values()) > 10 and batch.is_answer.any()
    for row in range(3):
        for at in np.flatnonzero(batch.targets[row] != NO_TARGET):
            assert batch.tokens[row, at + 1] == batch.targets[row, at]
            assert batch.samples[row, at + 1] == batch.samples[row, at]
            assert batch.branches[row, at + 1] == batch.branches[row, at]
            assert batch.positions[row, at + 1] == batch.positions[row, at] + 1


def test_dense_and_block_mask_are_equal(library: Library, tokenizer: Tokenizer) -> None:
    batch = batches(library, tokenizer).batch(1)
    samples, branches = (torch.from_numpy(array[:1, :256]) for array in (batch.samples, batch.branches))
    dense = dense_mask(samples, branches)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 256, 16, generator=generator) for heads in (4, 2, 2))
    expected = attend(q, k, v, dense)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is slow unless compiled
        found = attend(q, k, v, block_mask(samples, branches, is_compiled=False))
    assert torch.allclose(found, expected, atol=1e-5)
    for query, key in ((0, 1), (255, 0), (100, 100)):
        is_own = samples[0, query] == samples[0, key] and (
            branches[0, key] == 0 or branches[0, key] == branches[0, query]
        )
        assert bool(dense[0, 0, query, key]) == bool(key <= query and is_own)


def test_rows_too_short_for_any_example_are_refused(
    library: Library, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_MAX_TOO_LONG", 20)
    with pytest.raises(ValueError, match="raise row_tokens"):
        replace(batches(library, tokenizer), row_tokens=16).batch(0)
