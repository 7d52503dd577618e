"""Answers the questions of a set greedily with Stillroom's engine."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stillroom.answer_quality.answer_metrics import exact_match, word_f1
from stillroom.answer_quality.questions import ChunkQuestion, load_questions
from stillroom.backends.engine_building import build_engine
from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.config.settings import RuntimeConfig
from stillroom.core.clock import SystemClock
from stillroom.core.ids import RequestId
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.models.loader import LoadedModel, load_model
from training.data.worlds import SILENT
from training.export import MAX_ANSWER_TOKENS

_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """One question with the model's answer."""

    question: ChunkQuestion
    group: str
    """Its document or world; questions of one group are not independent samples."""
    answer: str

    @property
    def is_right(self) -> float:
        return exact_match(self.answer, self.question.answers)

    @property
    def f1(self) -> float:
        return word_f1(self.answer, self.question.answers)

    @property
    def is_silent(self) -> float:
        """1 if the model answers that the documents do not say, else 0."""
        return exact_match(self.answer, (SILENT,))


def load_set(path: Path, limit: int | None = None) -> list[tuple[ChunkQuestion, str]]:
    """Read the first questions of a file, each with its group."""
    lines = path.read_text(encoding="utf-8").splitlines()
    groups = [str(json.loads(line)["document"]) for line in lines if line.strip()]
    return list(zip(load_questions(path, limit), groups, strict=False))


def ask(
    checkpoint: str,
    questions: Sequence[tuple[ChunkQuestion, str]],
    *,
    device: str = "cpu",
    on_answer: Callable[[int], None] = lambda done: None,
) -> list[Asked]:
    """Answer questions with full prefills in batches, which does not change tokens.

    Raises:
        ModelError: Stillroom cannot load the checkpoint.
    """
    model = load_model(checkpoint, device=device, dtype="float32")
    engine, _ = build_engine(model.decoder, RuntimeConfig(max_num_batched_tokens=4096), SystemClock())
    found: list[Asked] = []
    for start in range(0, len(questions), _AT_ONCE):
        some = questions[start : start + _AT_ONCE]
        answers = _answers(engine, model, [question for question, _ in some])
        found += [Asked(question, group, text) for (question, group), text in zip(some, answers, strict=True)]
        on_answer(len(found))
    return found


def _answers(engine: Engine, model: LoadedModel, questions: Sequence[ChunkQuestion]) -> Iterator[str]:
    prompts = PromptBuilder(model.tokenizer, format_for(model.tokenizer))
    most = model.decoder.spec.max_positions - MAX_ANSWER_TOKENS
    for number, question in enumerate(questions):
        engine.submit(
            Request(
                request_id=RequestId(str(number)),
                prompt=prompts.build(question.chunks, question.question, most),
                sampling=SamplingParams(max_tokens=MAX_ANSWER_TOKENS),
                stop_token_ids=model.stop_token_ids,
            )
        )
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(questions))}
    while engine.has_work:
        for event in engine.step():
            if event.token_id is not None:
                tokens[str(event.request_id)].append(event.token_id)
    return (model.tokenizer.decode(tokens[str(number)]).strip() for number in range(len(questions)))
