"""The bundled model scores in Stillroom's engine what its card states, which was measured with transformers."""

import json
from collections import Counter
from pathlib import Path

import pytest

from stillroom.backends.engine_building import build_engine
from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.config.settings import RuntimeConfig, Weights
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId, RequestId
from stillroom.core.request import Request, SamplingParams
from stillroom.models.loader import load_model
from tests.engine.harness import Run
from tests.fakes import ManualClock

CARD = {"single": 0.912, "split": 0.840, "twohop": 0.472, "chain": 0.480}


@pytest.mark.shared
@pytest.mark.parametrize(
    ("weights", "tolerance"), [("checkpoint", 0.001), ("int8", 0.025), ("w8a8", 0.025), ("int4", 0.06)]
)
@pytest.mark.slow  # 500 questions
def test_exact_match_equals_the_model_card(shared: Path, weights: Weights, tolerance: float) -> None:
    model = load_model("bundled:microworld", device="cpu", weights=weights)
    builder = PromptBuilder(model.tokenizer, format_for(model.tokenizer))
    run = Run(build_engine(model.decoder, RuntimeConfig(), ManualClock())[0])
    rows = [json.loads(line) for line in (shared / "models/microworld/eval.jsonl").read_text().splitlines()]
    for index, row in enumerate(rows):
        texts = [text.removeprefix("<chunk> ").removesuffix(" </chunk>") for text in row["chunks"]]
        chunks = [Chunk(ChunkId(place), DocumentId("eval"), place, text) for place, text in enumerate(texts)]
        question = row["question"].removeprefix("<q> ").removesuffix(" <a>")
        run.submit(
            Request(
                request_id=RequestId(str(index)),
                prompt=builder.build(chunks, question, max_tokens=2000),
                sampling=SamplingParams(max_tokens=8),
                stop_token_ids=model.stop_token_ids,
            )
        )
    run.finish()
    right: Counter[str] = Counter()
    for index, row in enumerate(rows):
        right[row["kind"]] += model.tokenizer.decode(run.tokens[str(index)]) == row["answer"]
    assert {kind: count / 125 for kind, count in right.items()} == pytest.approx(CARD, abs=tolerance)
