"""Fixtures of the reader's training: a tiny embedder, and data in the layout of reading-qa."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import BertPreTokenizer

from stillroom.models.reader_model import ReaderSpec
from tests.training.conftest import write_rows
from training.reader.examples import Coder, ExampleSet, read_examples, technical_files
from training.reader.neighbours import PEOPLE, prepare
from training.reader.train import Recipe

SPEC = ReaderSpec(
    vocab_size=512, hidden_size=32, num_layers=2, num_heads=4, inner_size=64, max_positions=256, pair_size=8
)
RECIPE = Recipe(
    num_steps=6, warm_up=2, groups_per_step=4, max_tokens=80, learning_rate=5e-3, skipped=("covid-qa",), seed=3
)
NUM_PASSAGES, NUM_TECHNICAL = 150, 40
_TEXT = "the mill of was built in by a on and opened it river bridge what when who stands near . ? town"
WORDS = _TEXT.split()
DIGITS = [str(number) for number in range(10)]


def vocabulary() -> dict[str, int]:
    """Return ids of words; [CLS] and [SEP] have those of the real tokenizer."""
    named = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 101, "[SEP]": 102}
    own = [f"w{n}" for n in range(NUM_PASSAGES)] + [f"t{n}" for n in range(NUM_TECHNICAL)]
    return named | {word: 103 + place for place, word in enumerate([*WORDS, *DIGITS, *own])}


def passage(word: str, number: int) -> str:
    """Return four sentences about `word`; the mill was built by the first digit of `number` in the second."""
    return (
        (
            f"The mill of {word} stands near the river. It was built by {number % 10} and {number // 10 % 10}. "
            f"The bridge of {word} opened in the town. What was on it and when opened the mill."
        )
        .replace("The", "the")
        .replace("It", "it")
        .replace("What", "what")
    )


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random BERT of the size of `SPEC` with a tokenizer of whole words."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("embedder")
    sizes = asdict(SPEC)
    config = BertConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        intermediate_size=sizes["inner_size"],
        max_position_embeddings=sizes["max_positions"],
    )
    torch.manual_seed(1)
    config.save_pretrained(folder)
    save_file(
        {name: one.contiguous() for name, one in BertModel(config).state_dict().items()}, folder / "model.safetensors"
    )
    tokenizer = Tokenizer(WordLevel(vocabulary(), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def reading_qa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reading-qa")
    passages: list[dict[str, Any]] = []
    questions: list[dict[str, Any]] = []
    for number in range(NUM_PASSAGES):
        source = "covid-qa" if number % 10 == 0 else "squad"
        word, text = f"w{number}", passage(f"w{number}", number)
        passages.append({"_id": f"p{number}", "source": source, "title": f"Mill {number}", "text": text})
        answer = f"{number % 10} and {number // 10 % 10}"
        for asked, wanted in (
            (f"who built the mill of {word}?", answer),
            ("what opened in the town?", f"the bridge of {word}"),
        ):
            starts = {"answers": [wanted], "answer_starts": [text.index(wanted)]}
            questions.append({"passage": f"p{number}", "question": asked, **starts})
    write_rows(folder / "passages.jsonl", passages)
    write_rows(folder / "questions.jsonl", questions)
    return folder


@pytest.fixture(scope="session")
def technical(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("technical")
    rows = []
    for number in range(NUM_TECHNICAL):
        text = passage(f"t{number}", number)
        asked = [{"question": f"what opened in the town t{number}?", "answer": f"the bridge of t{number}"}]
        rows.append({"source": "town", "title": f"Bridge {number}", "text": text, "questions": asked})
    write_rows(folder / "1.jsonl", rows[:20])
    write_rows(folder / "2.jsonl", rows[20:])
    (folder / "README.md").write_text("| source | work | licence |\n|---|---|---|\n| town | Town records | MIT |\n")
    return folder


def random_vectors(texts: Any) -> NDArray[np.float32]:
    """Embed every text as a random vector of length 1."""
    vectors = np.random.default_rng(len(texts)).normal(size=(len(texts), 8)).astype(np.float32)
    normed: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normed


@pytest.fixture(scope="session")
def prepared(reading_qa: Path, technical: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared")
    assert len(list(prepare(reading_qa, technical_files(technical), out, random_vectors))) == 2
    return out


@pytest.fixture(scope="session")
def coder(bert: Path) -> Coder:
    return Coder(bert / "tokenizer.json")


@pytest.fixture(scope="session")
def examples(reading_qa: Path, technical: Path, prepared: Path, coder: Coder) -> ExampleSet:
    neighbours = np.load(prepared / PEOPLE)
    return read_examples(
        reading_qa, technical_files(technical), coder, neighbours, RECIPE.skipped, RECIPE.technical_weight
    )
