"""Tests the worlds of long documents, the rows that microworld is trained on, and the questions about them."""

import itertools
import json
import os
import random
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import training.microworld.train as trainer
from stillroom_bench.quality.context_questions import read_questions
from training.__main__ import run_command
from training.data.split import Split
from training.data.worlds import load_generator
from training.microworld.long_worlds import MAX_DISTANCE, LongWorld, make_world, retrieve
from training.microworld.train import RETRIEVED, WHOLE, Row, Shape, TrainOptions, train, write_questions

pytestmark = [pytest.mark.shared, pytest.mark.usefixtures("one_thread")]

BUNDLED = Path(__file__).parents[3] / "src/stillroom/models/bundled/microworld"
LENGTHS = (30, 12, 1)


@pytest.fixture(scope="module")
def generator(shared: Path) -> Any:
    return load_generator(shared)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED)


def worlds(generator: Any, num_worlds: int, split: Split = "train") -> Iterator[LongWorld]:
    for seed in range(num_worlds):
        yield make_world(generator, random.Random(seed), split, LENGTHS)


def subject_of(text: str) -> str:
    """Return the name that a question is about: the last run of capitalised words, without the question word."""
    names: list[str] = re.findall(r"(?:[A-Z][a-z]+ ?)+", text.removesuffix(" Give both ."))
    return names[-1].strip()


def test_documents_have_the_requested_lengths(generator: Any) -> None:
    for world in worlds(generator, 5):
        assert tuple(map(len, world.documents)) == LENGTHS


def test_answer_and_subject_are_in_the_needed_chunks(generator: Any) -> None:
    kinds, distances = set(), set()
    for world in worlds(generator, 30):
        for one in world.questions:
            chunks = [world.documents[one.document][place] for place in one.needed]
            assert subject_of(one.text) in chunks[0]
            assert one.distance == (one.needed[-1] - one.needed[0] if one.kind == "split" else 0)
            kinds.add(one.kind)
            distances.add(one.distance)
            if one.kind == "chain":
                assert any(
                    first in chunks[0] and first in chunks[1] and last in chunks[1]
                    for first, last in halves(one.answer)
                )
            else:
                assert f" {one.answer} " in chunks[-1]
    assert kinds == {"single", "split", "twohop", "chain"}
    assert distances == set(range(MAX_DISTANCE + 1))


def halves(answer: str) -> list[tuple[str, str]]:
    words = answer.split()
    return [(" ".join(words[:cut]), " ".join(words[cut:])) for cut in range(1, len(words))]


def test_continuation_chunks_do_not_name_their_subject(generator: Any) -> None:
    num_continuations = 0
    for world in worlds(generator, 30):
        for one in world.questions:
            if one.kind == "split":
                first, stated = one.needed
                for place in range(first + 1, stated + 1):
                    assert subject_of(one.text) not in world.documents[one.document][place]
                    num_continuations += 1
    assert num_continuations > 1000


def test_questions_have_rivals_that_state_the_same_relation(generator: Any) -> None:
    for world in worlds(generator, 30):
        assert len(world.relation_of) == len(world.questions)
        for one, relation in zip(world.questions, world.relation_of, strict=True):
            places = world.stated[relation]
            assert (one.document, one.needed[-1]) in places
            assert len(set(places)) == len(places) >= 2, "no chunk states a relation twice"


def test_search_result_has_the_needed_chunks_then_rivals(generator: Any) -> None:
    for seed, world in enumerate(worlds(generator, 10)):
        everything = {(name, at) for name, chunks in enumerate(world.documents) for at in range(len(chunks))}
        for number, one in enumerate(world.questions):
            found = retrieve(world, number, 5, random.Random(seed))
            assert found == sorted(set(found)) and len(found) == 5 and set(found) <= everything
            needed = {(one.document, place) for place in one.needed}
            assert needed <= set(found)
            rivals = set(world.stated[world.relation_of[number]]) - needed
            assert len(rivals & set(found)) == min(len(rivals), 5 - len(needed)), "rivals come before other chunks"


def test_evaluation_worlds_have_other_persons_and_firms(generator: Any) -> None:
    first, last = {*generator.FIRST_F, *generator.FIRST_M, *generator.FIRM}, {*generator.LAST, *generator.SUFFIX}

    def names(split: Split) -> set[tuple[str, str]]:
        words = " ".join(
            text for world in worlds(generator, 60, split) for document in world.documents for text in document
        ).split()
        return {pair for pair in itertools.pairwise(words) if pair[0] in first and pair[1] in last}

    trained, held = names("train"), names("eval")
    assert len(trained) > 500 and len(held) > 300 and not trained & held


def test_same_seed_gives_the_same_world(generator: Any) -> None:
    one, two = (make_world(generator, random.Random(7), "train", LENGTHS) for _ in range(2))
    assert one == two
    assert one != make_world(generator, random.Random(8), "train", LENGTHS)


def test_missing_generator_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="world.py is missing; name the folder .* with --shared"):
        load_generator(tmp_path)


@pytest.mark.parametrize("shape", [WHOLE, RETRIEVED])
def test_rows_of_a_training_step(shared: Path, generator: Any, tokenizer: Any, shape: Shape) -> None:
    options = TrainOptions(BUNDLED, shared, Path("unused"))
    rows = list(itertools.islice(trainer._rows(options, tokenizer, shape), 30))
    assert rows == list(itertools.islice(trainer._rows(options, tokenizer, shape), 30)), "a function of the seed"
    num_pairs = 0
    for row in rows:
        assert len(row.ids) == len(row.positions) == len(row.pairs) == len(row.answers) <= shape.tokens
        assert tokenizer.unk_token_id not in row.ids
        size = row.pairs.count(0)
        text = tokenizer.decode(row.ids[:size])
        assert text.startswith(generator.SYSTEM) and text.count("<chunk>") == text.count("</chunk>") >= 3
        assert row.pairs == sorted(row.pairs), "the context, then one pair after the other"
        assert row.positions[:size] == list(range(size)) and not any(row.answers[:size])
        for pair in range(1, row.pairs[-1] + 1):
            check_pair(row, pair, size, tokenizer)
            num_pairs += 1
    assert num_pairs > 60


def check_pair(row: Row, pair: int, context: int, tokenizer: Any) -> None:
    places = [place for place, number in enumerate(row.pairs) if number == pair]
    assert [row.positions[place] for place in places] == list(range(context, context + len(places)))
    words = [tokenizer.convert_ids_to_tokens(row.ids[place]) for place in places]
    asked = words.index("<a>") + 1
    assert words[0] == "<q>" and words[-1] == "<eos>" and len(words) > asked + 1
    assert [row.answers[place] for place in places] == [0] * asked + [1] * (len(words) - asked)
    stated = set(tokenizer.convert_ids_to_tokens(row.ids[:context]))
    assert set(words[asked:-1]) <= stated, "the context states the answer"
    assert set(subject_of(" ".join(words[1 : asked - 1])).split()) <= stated, "and names the subject"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Write a small Llama with random weights and microworld's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_two_steps_write_a_finite_checkpoint(
    shared: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[float] = []
    loss = trainer._loss

    def recorded(model: LlamaForCausalLM, rows: list[Row]) -> tuple[torch.Tensor, float]:
        total, answers = loss(model, rows)
        losses.extend([float(total.detach()), answers])
        return total, answers

    monkeypatch.setattr(trainer, "_loss", recorded)
    options = TrainOptions(tiny, shared, tmp_path / "out", minutes=10)
    said: list[dict[str, Any]] = []
    assert train(options, said.append, lambda: len(losses) == 4) == tmp_path / "out"
    assert said == [], "progress is reported every 100 steps"
    assert len(losses) == 4 and all(0 < one < 10 for one in losses)
    before, after = (LlamaForCausalLM.from_pretrained(path) for path in (tiny, tmp_path / "out"))
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == AutoTokenizer.from_pretrained(tiny).get_vocab()
    )
    changed = {name: not torch.equal(old, after.state_dict()[name]) for name, old in before.state_dict().items()}
    assert all(changed.values()), changed
    assert all(bool(torch.isfinite(weights).all()) for weights in after.state_dict().values())


def test_a_pair_does_not_see_the_others(shared: Path, tiny: Path, tokenizer: Any) -> None:
    options = TrainOptions(tiny, shared, Path("unused"))
    row = next(row for row in trainer._rows(options, tokenizer, RETRIEVED) if row.pairs[-1] > 2)
    last = [place for place, pair in enumerate(row.pairs) if pair in (0, row.pairs[-1])]
    alone = replace(row, **{name: [getattr(row, name)[place] for place in last] for name in Row.__slots__})
    is_last = [pair == row.pairs[-1] for pair in row.pairs]
    others = replace(row, answers=[flag * own for flag, own in zip(row.answers, is_last, strict=True)])
    model = LlamaForCausalLM.from_pretrained(tiny)
    assert trainer._loss(model, [others])[1] == pytest.approx(trainer._loss(model, [alone])[1], rel=1e-2)


def test_signal_ends_training_with_a_checkpoint(
    shared: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = trainer._loss

    def with_signal(model: LlamaForCausalLM, rows: list[Row]) -> tuple[torch.Tensor, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return loss(model, rows)

    monkeypatch.setattr(trainer, "_loss", with_signal)
    out = tmp_path / "out"
    folders = ["--model", str(tiny), "--shared", str(shared), "--out", str(out)]
    with pytest.raises(SystemExit) as end:
        run_command(["microworld", "train", *folders])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(out), "done": False}
    assert (out / "model.safetensors").is_file() and (out / "tokenizer.json").is_file()


def test_missing_folders_are_named(
    shared: Path, tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folders, hint in (
        (["--model", "nowhere", "--shared", str(shared)], "nowhere has no config.json"),
        (["--model", str(tiny), "--shared", "nowhere"], "world.py is missing"),
    ):
        with pytest.raises(SystemExit) as end:
            run_command(["microworld", "train", *folders, "--out", str(tmp_path / "out")])
        assert end.value.code == 2 and hint in capsys.readouterr().err


def test_written_questions_are_those_of_the_benchmark(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new/questions.jsonl"
    options = ["--shared", str(shared), "--out", str(file), "--num-questions", "60", "--chunks", "4"]
    with pytest.raises(SystemExit) as end:
        run_command(["microworld", "questions", *options])
    assert end.value.code == 0
    counts = {"split": 30, "single": 10, "twohop": 10, "chain": 10}
    assert json.loads(capsys.readouterr().out) == counts
    found = read_questions(file)
    distances = [one.distance for one in found if one.kind == "split"]
    assert sorted(distances) == sorted(3 * list(range(1, MAX_DISTANCE + 1)))
    for one in found:
        assert len(one.retrieved) == 4 and set(one.needed) <= set(one.retrieved)
        assert one.answer.split()[-1] in one.chunk(one.needed[-1]).text.split()
    again = tmp_path / "again.jsonl"
    assert write_questions(shared, again, num_questions=60, num_chunks=4, seed=1) == counts
    assert again.read_bytes() == file.read_bytes() and list(tmp_path.rglob("*.tmp")) == []
