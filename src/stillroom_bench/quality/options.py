"""Options of the benchmarks of a user's own data and machine. Imports nothing heavy: flags are made from these."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stillroom.config.settings import TokenSelector
from stillroom_bench.instrument.options import (
    REQUIRED,
    datasets_flag,
    flag,
    named_pythons,
    peers_flag,
    repeat_flag,
    seed_flag,
)


@dataclass(frozen=True, slots=True)
class RetrievalOptions:
    """Of `stillroom bench retrieval`."""

    datasets: tuple[Path, ...] = datasets_flag()
    split: str = flag("test", "Judgements to use: qrels/NAME.tsv, such as dev.")
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Of `stillroom bench index`."""

    datasets: tuple[Path, ...] = datasets_flag()
    sizes: tuple[int, ...] = flag((10_000, 50_000), "Vectors in a corpus.", "--size", min=1)
    peers: tuple[str, ...] = flag(
        (), "A library to measure beside ours: hnswlib, usearch or bm25s; without it, all.", "--peer"
    )
    repeat: int = repeat_flag(7)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class FilterOptions:
    """Of `stillroom bench filters`."""

    datasets: tuple[Path, ...] = datasets_flag()
    size: int = flag(100_000, "Vectors in the indexes.", min=1)
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class QuestionOptions:
    """Of `stillroom bench questions`: which questions are asked, and when."""

    dataset: Path = flag(REQUIRED, "A data set.", path="folder")
    num_questions: int = flag(400, "Questions asked per run.", "--questions", min=20)
    rate: float = flag(20.0, "Questions per second, on average.", min=0.1)
    change_every: int = flag(50, "Questions between two changes of a document.", min=1)
    zipf: float = flag(
        1.0, "Skew: the n-th most popular question is asked in proportion to 1 / n^S.", metavar="S", min=0.0
    )
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Of `stillroom bench runtime`."""

    peers: tuple[str, ...] = peers_flag()
    dtypes: tuple[str, ...] = flag(("bfloat16", "float32"), "bfloat16 or float32.", "--dtype", metavar="DTYPE")
    lengths: tuple[int, ...] = flag((256, 1024, 2048), "Tokens of a prompt.", "--length", min=1)
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()

    def __post_init__(self) -> None:
        """Raises UsageError where a peer has no Python."""
        named_pythons(self.peers)


@dataclass(frozen=True, slots=True)
class FixedShapesOptions:
    """Of `stillroom bench fixed-shapes`."""

    model: str = flag("bundled", "A folder, a hub name, or bundled.", metavar="MODEL")
    dtype: Literal["bfloat16", "float32"] = flag("bfloat16", "Of the model.")
    num_questions: int = flag(200, "Questions of each run.", "--questions", min=1)
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class SavingsOptions:
    """Of `stillroom bench savings`."""

    traces: tuple[Path, ...] = flag(REQUIRED, "A trace.", "--trace", path="file")
    capacities: tuple[float, ...] = flag(
        (0.1, 0.25, 0.5),
        "Share of all distinct passages that fits beside the longest prompt; capacity for all is always counted too.",
        "--capacity",
        min=0.0,
        max=1.0,
    )
    ratios: tuple[float, ...] = flag(
        (0.0, 0.15, 0.3), "Share of placed tokens that is recomputed.", "--ratio", min=0.0, max=1.0
    )


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Of `stillroom bench quality`."""

    questions: Path = flag(REQUIRED, "A file of questions, or a data set.", metavar="PATH")
    model: str = flag("bundled", "bundled, a checkpoint's folder or a hub name.")
    num_questions: int | None = flag(None, "Questions at most.", "--limit", min=1)
    num_chunks: int | None = flag(None, "Documents of a question, at most.", "--chunks", min=1)
    max_words: int | None = flag(None, "Words of a document, at most; longer documents are cut.", "--words", min=1)
    seed: int = seed_flag()
    ratios: tuple[float, ...] = flag((), "Share of tokens that is recomputed.", "--ratio", min=0.0, max=1.0)
    selectors: tuple[TokenSelector, ...] = flag(
        (), "A value of reuse.token_selector; without it, all.", "--selector", metavar="NAME"
    )
    alphas: tuple[float, ...] = flag((), "Use each document's CFO, times this, as its budget.", "--alpha", min=0.0)
    focus_window: int = flag(
        0, "Also repair only what is in focus over so many layers; 0: do not.", "--focus", metavar="LAYERS", min=0
    )
    has_unturned: bool = flag(False, "Also with keys that are not turned.", "--unturned")
    is_shuffled: bool = flag(False, "Keep KV of the question's own documents in another order.", "--shuffled")
    max_tokens: int = flag(16, "Tokens of an answer.", min=1)
