"""Option classes of the benchmarks in `quality`. Imports nothing heavy, because flags are generated from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stillroom.config.settings import ReuseMode, TokenSelector
from stillroom.models.bundled_models import MICROWORLD, READER
from stillroom_bench.instrument.option_flags import (
    REQUIRED,
    datasets_flag,
    device_flag,
    flag,
    model_flag,
    named_pythons,
    peers_flag,
    repeat_flag,
    seed_flag,
    size_flag,
)


@dataclass(frozen=True, slots=True)
class RetrievalOptions:
    """Options of `stillroom bench retrieval`."""

    datasets: tuple[Path, ...] = datasets_flag()
    split: str = flag("test", "Judgements to use: qrels/NAME.tsv, such as dev.")
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class FollowUpOptions:
    """Options of `stillroom bench follow-ups`."""

    datasets: tuple[Path, ...] = datasets_flag()
    split: str = flag("test", "Judgements to use: qrels/NAME.tsv, such as dev.")
    num_conversations: int = flag(200, "Most follow-ups of a data set.", "--conversations", min=20)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Options of `stillroom bench index`."""

    datasets: tuple[Path, ...] = datasets_flag()
    sizes: tuple[int, ...] = flag((10_000, 25_000, 50_000), "Vectors in a corpus.", "--size", min=1)
    peers: tuple[str, ...] = flag(
        (), "A library to compare with: faiss, hnswlib, usearch or bm25s; default: all.", "--peer"
    )
    pgvector: str = flag(
        "",
        "A PostgreSQL database with the extension vector, to measure pgvector too; what is made there is removed.",
        metavar="URL",
    )
    repeat: int = repeat_flag(7)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class FilterOptions:
    """Options of `stillroom bench filters`."""

    datasets: tuple[Path, ...] = datasets_flag()
    size: int = flag(100_000, "Vectors in the indexes.", min=1)
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class QuestionOptions:
    """Options of `stillroom bench questions`."""

    dataset: Path = flag(REQUIRED, "A data set.", path="folder")
    num_questions: int = flag(400, "Questions per run.", "--questions", min=20)
    rate: float = flag(20.0, "Mean number of questions per second.", min=0.1)
    change_every: int = flag(50, "Questions between two document changes.", min=1)
    zipf: float = flag(
        1.0, "Skew: the frequency of the n-th most popular question is proportional to 1 / n^S.", metavar="S", min=0.0
    )
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Options of `stillroom bench runtime`."""

    peers: tuple[str, ...] = peers_flag()
    dtypes: tuple[str, ...] = flag(("bfloat16", "float32"), "bfloat16 or float32.", "--dtype", metavar="DTYPE")
    lengths: tuple[int, ...] = flag((256, 1024, 2048), "Tokens of a prompt.", "--length", min=1)
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()
    device: Literal["cpu", "cuda"] = device_flag()
    size: Literal["135m", "1.5b"] = size_flag()

    def __post_init__(self) -> None:
        """Check the options; raises UsageError if a peer has no Python."""
        named_pythons(self.peers)


@dataclass(frozen=True, slots=True)
class NeighboursOptions:
    """Options of `stillroom bench neighbours`."""

    model: Path | None = model_flag()
    length: int = flag(64, "Tokens of a prompt.", min=1)
    num_requests: int = flag(5, "Prompts per run, one after the other.", "--requests", min=1)
    num_processes: int = flag(0, "Processes that spin; 0: as many as CPUs.", "--processes", min=0)
    repeat: int = repeat_flag(7)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class EnginesOptions:
    """Options of `stillroom bench engines`."""

    documents: tuple[Path, ...] = flag(REQUIRED, "A document or a folder of documents.", metavar="PATH")
    questions: Path = flag(
        REQUIRED, "Questions about them, one per line, as text or JSON.", path="file", metavar="FILE"
    )
    experiment: Literal["split", "routing"] = flag(
        "split",
        "split: a front with one engine against one process. routing: several engines against one, where the questions "
        "need more KV than an engine has memory for.",
    )
    model: str = flag(MICROWORLD, "A checkpoint folder, a hub name, or a bundled decoder.", metavar="MODEL")
    num_questions: int = flag(16, "Different questions.", "--different", min=2)
    num_tokens: int = flag(48, "Tokens of each answer.", "--tokens", min=2)
    num_clients: int = flag(1, "Questions asked at the same time.", "--clients", min=1, max=64)
    num_threads: int = flag(1, "Threads of each engine, and of the one process.", "--threads", min=1)
    num_engines: int = flag(2, "With routing: engines of the second arm.", "--engines", min=2, max=64)
    num_requests: int = flag(60, "With routing: measured requests; as many before them.", "--requests", min=2)
    zipf: float = flag(0.6, "With routing: Zipf exponent of the popularity of questions.", metavar="S", min=0.0)
    share: float = flag(
        0.5, "With routing: an engine's memory, as a share of the KV that all questions need.", min=0.05, max=1.0
    )
    repeat: int = repeat_flag(5, "Runs per arm; with split after one warm-up run.")
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """Options of `stillroom bench lookup`."""

    model: Path | None = model_flag()
    dtype: Literal["bfloat16", "float32"] = flag("bfloat16", "Data type of the model.")
    length: int = flag(1024, "Tokens of a prompt.", min=4)
    answer_length: int = flag(192, "Tokens of an answer.", "--answer-length", min=2)
    run_length: int = flag(32, "Tokens that are quoted in a row.", "--run-length", min=4)
    num_requests: int = flag(1, "Answers at the same time.", "--requests", min=1, max=32)
    num_proposed: int = flag(7, "Most tokens proposed per step and answer (`runtime.prompt_lookup`).", "--most", min=1)
    repeat: int = repeat_flag(7)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class FixedShapesOptions:
    """Options of `stillroom bench fixed-shapes`."""

    model: str = flag(MICROWORLD, "A checkpoint folder, a hub name, or a bundled decoder.", metavar="MODEL")
    dtype: Literal["bfloat16", "float32"] = flag("bfloat16", "Data type of the model.")
    num_questions: int = flag(200, "Questions per run.", "--questions", min=1)
    repeat: int = repeat_flag(5)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class SavingsOptions:
    """Options of `stillroom bench savings`."""

    traces: tuple[Path, ...] = flag(REQUIRED, "A trace.", "--trace", path="file")
    capacities: tuple[float, ...] = flag(
        (0.5, 0.25, 0.1),
        "Share of all distinct passages that fits next to the longest prompt; unlimited capacity is always included.",
        "--capacity",
        min=0.0,
        max=1.0,
    )
    ratios: tuple[float, ...] = flag(
        (0.0, 0.15, 0.3), "Share of placed tokens that is recomputed.", "--ratio", min=0.0, max=1.0
    )
    lengths: tuple[Path, ...] = flag(
        (),
        "Also count prompt and answer tokens of a trace: CSV with ContextTokens and GeneratedTokens, or JSON lines "
        "with input_length and output_length.",
        path="file",
    )


@dataclass(frozen=True, slots=True)
class EndToEndOptions:
    """Options of `stillroom bench answers`."""

    questions: tuple[Path, ...] = flag(
        REQUIRED, "A data set whose queries have answers, or a file of questions.", metavar="PATH"
    )
    kb: Path | None = flag(None, "Knowledge base that a file of questions is about.", path="folder")
    models: tuple[str, ...] = flag(
        (), "A checkpoint folder, a hub name, or bundled; default: the setting.", "--model", metavar="MODEL"
    )
    has_gold: bool = flag(False, "Also answer from the gold passage only, without a search in the others.", "--gold")
    has_without_gold: bool = flag(
        False, "Also answer without the gold passage, where refusing to answer is right.", "--without-gold"
    )
    num_questions: int | None = flag(None, "Maximum number of questions of each input.", "--limit", min=1)
    max_tokens: int = flag(64, "Maximum number of tokens of an answer.", min=1)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class HopsOptions:
    """Options of `stillroom bench hops`."""

    questions: Path = flag(REQUIRED, "A file of questions with their documents.", path="file", metavar="FILE")
    part: Literal["test", "choose"] = flag(
        "test", "Questions to use: test, or choose, on which the rules of hops were chosen."
    )
    hops: tuple[int, ...] = flag((2, 3), "Most searches for a question; one hop is always measured.", min=1, max=5)
    model: str = flag(READER, "The bundled reader, a checkpoint folder, a hub name, or a bundled decoder.")
    hop_question: Literal["auto", "model", "answer"] = flag("auto", "The setting search.hop_question.")
    reuse: tuple[ReuseMode, ...] = flag(
        (), "A value of reuse.mode, for a model that keeps KV; default: exact.", "--reuse", metavar="MODE"
    )
    num_questions: int | None = flag(None, "Maximum number of questions.", "--limit", min=1)
    max_tokens: int = flag(128, "Maximum number of tokens of an answer.", min=1)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options of `stillroom bench quality`."""

    questions: Path = flag(REQUIRED, "A file of questions, or a data set.", metavar="PATH")
    model: str = flag(MICROWORLD, "A checkpoint folder, a hub name, or a bundled decoder.")
    num_questions: int | None = flag(None, "Maximum number of questions.", "--limit", min=1)
    num_chunks: int | None = flag(None, "Maximum number of documents of a question.", "--chunks", min=1)
    max_words: int | None = flag(None, "Maximum number of words of a document; longer ones are cut.", "--words", min=1)
    seed: int = seed_flag()
    ratios: tuple[float, ...] = flag((), "Share of tokens that is recomputed.", "--ratio", min=0.0, max=1.0)
    selectors: tuple[TokenSelector, ...] = flag(
        (), "A value of reuse.token_selector; default: all.", "--selector", metavar="NAME"
    )
    alphas: tuple[float, ...] = flag(
        (), "Add arms whose recompute budget is ALPHA times each document's CFO.", "--alpha", metavar="ALPHA", min=0.0
    )
    focus_window: int = flag(
        0,
        "Add arms that recompute only documents in focus over this many layers; 0 adds none.",
        "--focus",
        metavar="LAYERS",
        min=0,
    )
    has_unturned: bool = flag(False, "Add arms whose keys are not rotated to their new positions.", "--unturned")
    kept: tuple[float, ...] = flag(
        (),
        "Add arms that keep this share of the documents' text: unlikely tokens, or sentences like the question.",
        min=0.01,
        max=0.99,
    )
    is_shuffled: bool = flag(
        False,
        "Compute the KV to reuse among the question's own documents in another order, not behind a foreign document.",
        "--shuffled",
    )
    max_tokens: int = flag(16, "Maximum number of tokens of an answer.", min=1)


@dataclass(frozen=True, slots=True)
class ContextsOptions:
    """Options of `stillroom bench contexts`."""

    questions: Path = flag(REQUIRED, "A file of questions over whole documents.", path="file", metavar="FILE")
    model: str = flag(MICROWORLD, "A checkpoint folder, a hub name, or a bundled decoder.")
    num_questions: int | None = flag(None, "Maximum number of questions.", "--limit", min=1)
    windows: tuple[int, ...] = flag((), "Also prepare in windows of this many chunks.", "--window", min=2)
    bits: tuple[int, ...] = flag(
        (), "Also keep the KV in this many bits a number, 8 or 4, and compare with 16.", "--bits", metavar="8|4"
    )
    dtype: Literal["float32", "bfloat16"] = flag("float32", "Type of weights and KV: float32 or bfloat16.")
    max_tokens: int = flag(8, "Maximum number of tokens of an answer.", min=1)
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class LookingOptions:
    """Options of `stillroom bench looking`."""

    questions: Path | None = flag(
        None, "A file of questions over whole documents, as of `bench contexts`.", path="file", metavar="FILE"
    )
    datasets: tuple[Path, ...] = flag((), "A data set in BEIR layout.", "--dataset", path="folder")
    model: str = flag(MICROWORLD, "A checkpoint folder, a hub name, or a bundled decoder.")
    num_questions: int | None = flag(None, "Maximum number of questions of each input.", "--limit", min=1)
    num_candidates: int = flag(24, "Candidates of a question.", "--candidates", min=6)
    dtype: Literal["float32", "bfloat16"] = flag("float32", "Type of weights and KV: float32 or bfloat16.")
    seed: int = seed_flag()


@dataclass(frozen=True, slots=True)
class SupportOptions:
    """Options of `stillroom bench support`."""

    data: Path = flag(
        REQUIRED, "Questions about passages: passages.jsonl and questions.jsonl.", path="folder", metavar="FOLDER"
    )
    part: Literal["test", "choose"] = flag("test", "Titles to use: test, or choose, which chose the thresholds.")
    num_cases: int = flag(1000, "Maximum number of sentences.", "--sentences", min=2)
    seed: int = seed_flag()
