"""Tests `stillroom bench looking`: what the model sees in a candidate, the heads that are read, and the whole run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.config.settings import StillroomConfig
from stillroom.errors import UsageError
from stillroom.models.bundled_models import MICROWORLD, bundled_folder
from stillroom.models.loader import LoadedModel, load_model
from stillroom_bench.instrument.statistics import bootstrapped
from stillroom_bench.quality import looking
from stillroom_bench.quality.context_questions import ContextQuestion, read_questions
from stillroom_bench.quality.looking import run_looking
from stillroom_bench.quality.looking_arms import (
    ALL_HEADS,
    BEST_HEAD,
    CALIBRATED,
    LIKELIHOOD,
    SEARCH,
    View,
    fused,
    measures,
    scores_of,
)
from stillroom_bench.quality.looking_candidates import draw_candidates, names_in, with_neighbours
from stillroom_bench.quality.looking_scores import CONTENT_FREE, Look, Looker
from stillroom_bench.quality.looking_tables import Outcome, tables_of
from stillroom_bench.quality.quality_options import LookingOptions
from tests.bench.test_contexts import ASKED, DOCUMENT, TWO_DOCUMENTS, row, write

pytestmark = pytest.mark.usefixtures("one_thread")

OTHER = {
    "documents": [
        ["Holo Tevs was taught by Mula Brims .", "She studied optics ."],
        ["Pis Jurs bought the ship Perindra ."],
    ],
    "retrieved": [[0, 0]],
    "needed": [[0, 0], [0, 1]],
    "question": "What did Holo Tevs study ?",
    "answer": "optics",
    "kind": "split",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "questions.jsonl", [*(row(*one) for one in ASKED), TWO_DOCUMENTS, OTHER])


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(MICROWORLD, device="cpu", dtype="float32")


class Oracle:
    """`transformers` reads the question behind the system message and a chunk that was computed behind others."""

    def __init__(self, model: LoadedModel) -> None:
        folder = bundled_folder(MICROWORLD)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        self.prompts = PromptBuilder(model.tokenizer, format_for(model.tokenizer))

    @torch.inference_mode()
    def look(self, question: ContextQuestion, places: list[tuple[int, int]]) -> tuple[float, float, Any]:
        """Return likelihood, certainty and attention [2, L, H, n]; all but the last of the places are context only."""
        prompt = self.prompts.build([question.chunk(place) for place in places], question.question, None)
        system, *context, chunk, asked = (list(segment.token_ids) for segment in prompt.segments)
        skipped = sum(map(len, context))
        size = len(system) + skipped + len(chunk)
        kept = DynamicCache()
        # the cache by place, not by name: transformers 5.24 renamed `past_key_values` to `cache`
        self.model(torch.tensor([prompt.token_ids[:size]]), None, None, kept)
        for layer in kept.layers:
            layer.keys = self._without(layer.keys, len(system), skipped, is_key=True)
            layer.values = self._without(layer.values, len(system), skipped, is_key=False)
        positions = torch.arange(len(asked))[None] + size - skipped
        found = self.model(torch.tensor([asked]), None, positions, kept, output_attentions=True)
        logprobs = torch.log_softmax(found.logits[0], -1)
        likelihood = logprobs[range(len(asked) - 2), asked[1:-1]].mean()  # without the markers <q> and <a>
        weights = torch.stack(found.attentions)[:, 0, :, :, len(system) : size - skipped]
        return (
            float(likelihood),
            float(logprobs[-1].max()),
            torch.stack((weights[:, :, 1:-1].mean(2), weights[:, :, -1])),
        )

    def _without(self, kept: torch.Tensor, start: int, count: int, *, is_key: bool) -> torch.Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        later = kept[:, :, start + count :]
        if is_key and count:
            places = torch.full((1, later.shape[2]), -count)
            later = apply_rotary_pos_emb(later, later, *self.model.model.rotary_emb(later, places))[1]
        return torch.cat((kept[:, :, :start], later), dim=2)


@pytest.mark.parametrize("in_document", [False, True], ids=["alone", "in its document"])
def test_look_at_placed_kv_equals_transformers(path: Path, model: LoadedModel, in_document: bool) -> None:
    oracle, looker = Oracle(model), Looker(model)
    for question in (read_questions(path)[0], read_questions(path)[5]):
        prepared = looker.prepare(question, in_document=in_document)
        candidates = [prepared[question.chunk(place).chunk_id] for place in question.retrieved]
        look = looker.look(candidates, question.question, observes=True)
        for at, (document, chunk) in enumerate(question.retrieved):
            places = [(document, before) for before in range(chunk if in_document else 0)]
            likelihood, certainty, attention = oracle.look(question, [*places, (document, chunk)])
            assert look.likelihood_C[at] == pytest.approx(likelihood, abs=1e-4)
            assert look.certainty_C[at] == pytest.approx(certainty, abs=1e-4)
            np.testing.assert_allclose(look.attention[at], attention, atol=1e-5)
        unobserved = looker.look(candidates, question.question, observes=False)
        np.testing.assert_allclose(unobserved.likelihood_C, look.likelihood_C, atol=1e-6)
        assert unobserved.attention == ()


def test_model_looks_at_the_chunk_that_names_the_subject(path: Path, model: LoadedModel) -> None:
    looker, question = Looker(model), read_questions(path)[3]
    prepared = looker.prepare(question, in_document=False)
    look = looker.look(list(prepared.values()), question.question, observes=False)
    assert [question.chunk(place).chunk_id for place in question.retrieved] == list(prepared)
    assert look.likelihood_C.argmax() == 0


def test_document_that_is_too_long_is_refused(path: Path, model: LoadedModel) -> None:
    texts = ["She studied optics . " * 60] * 10
    long = {**OTHER, "documents": [texts], "retrieved": [[0, 9]], "needed": [[0, 9]]}
    (question,) = read_questions(write(path, [long]))
    assert len(Looker(model).prepare(question, in_document=False)) == 1
    with pytest.raises(UsageError, match=r"has \d+ tokens, and the model reads 2048"):
        Looker(model).prepare(question, in_document=True)


@pytest.mark.parametrize("count", [1, 2, 4, 6, 9, 99])
def test_candidates_are_needed_then_retrieved_then_own_then_foreign_chunks(path: Path, count: int) -> None:
    questions = read_questions(path)
    for given, drawn in zip(questions, draw_candidates(questions, count, 3), strict=True):
        question = drawn.question
        places = question.retrieved
        assert len(set(places)) == len(places) <= max(count, len(given.needed))
        ranks = {place: 2 for number, document in enumerate(given.documents) for place in _places(number, document)}
        ranks |= dict.fromkeys(given.retrieved, 1) | dict.fromkeys(given.needed, 0)
        chosen = sorted(ranks.get(place, 3) for place in places)
        assert chosen[: len(ranks)] == sorted(ranks.values())[: len(chosen)], "the first kinds come first"
        assert drawn.is_needed.sum() == len(given.needed) and drawn.num_missing == 0
        assert len({chunk.chunk_id for document in question.documents for chunk in document}) == sum(
            map(len, question.documents)
        )
        for document in question.documents[len(given.documents) :]:
            assert not any(name in chunk.text for chunk in document for name in names_in(question.question))
    again, other = (draw_candidates(questions, count, seed) for seed in (3, 4))
    assert again == draw_candidates(questions, count, 3)
    assert (other != again) or count == 1


def _places(number: int, document: Any) -> list[tuple[int, int]]:
    return [(number, chunk) for chunk in range(len(document))]


def test_documents_that_name_the_subject_are_no_foreign_candidates(path: Path) -> None:
    questions = read_questions(path)
    asked = draw_candidates(questions, 99, 0)
    about_jurs = [chunk.text for chunk in asked[0].chunks]
    assert "Holo Tevs was taught by Mula Brims ." in about_jurs
    assert "Pis Jurs bought the ship Perindra ." not in about_jurs
    assert names_in("Who taught Kala Broster in Sanford ? Give both .") == {"Kala Broster", "Sanford", "Give"}


def look_of(masses: Any, likelihood: Any) -> Look:
    """A look in which each candidate has two tokens with equal shares, and heads [C, L, H] look at it."""
    halves = np.asarray(masses, np.float32)[:, None, :, :, None] / 2
    attention = tuple(np.broadcast_to(one, (2, *one.shape[1:3], 2)) for one in halves)
    return Look(np.asarray(likelihood, float), np.asarray(likelihood, float), attention)


def test_heads_are_chosen_on_the_other_half() -> None:
    rng = np.random.default_rng(0)
    needed = [np.arange(6) == rng.integers(6) for _ in range(40)]
    nothing = look_of(np.zeros((6, 2, 3)), np.zeros(6))

    def views(labels: list[Any]) -> list[View]:
        noise = np.random.default_rng(1)
        found = []
        for is_needed in labels:
            masses = noise.random((6, 2, 3))
            masses[:, 1, 2] = is_needed + 0.01 * noise.random(6)  # one head sees it
            found.append(View.of(look_of(masses, noise.random(6)), nothing))
        return found

    scores, chosen = scores_of(views(needed), needed, 0)
    assert [text.split(", ")[0] for text in chosen] == ["1.2", "1.2"]
    assert all(one.argmax() == is_needed.argmax() for one, is_needed in zip(scores[BEST_HEAD], needed, strict=True))
    halves = np.random.default_rng(0).permutation(40) % 2
    wrong = [~one if half else one for one, half in zip(needed, halves, strict=True)]
    misled, chosen = scores_of(views(needed), wrong, 0)
    assert chosen[0].split(", ")[0] != "1.2" and chosen[1].split(", ")[0] == "1.2"
    for number, half in enumerate(halves):
        assert half == 0 or (misled[BEST_HEAD][number] == scores[BEST_HEAD][number]).all(), "labels of its own half"


def test_calibration_subtracts_the_attention_of_the_content_free_question() -> None:
    rng = np.random.default_rng(0)
    masses, bias = rng.random((5, 2, 3)), rng.random((5, 2, 3))
    view = View.of(look_of(masses + bias, np.zeros(5)), look_of(bias, np.zeros(5)))
    np.testing.assert_allclose(view.calibrated_CF[:, :6], masses.reshape(5, 6), atol=1e-6)
    np.testing.assert_allclose(view.icr_C, masses.mean((1, 2)), atol=1e-6)
    scores, _ = scores_of([view, view], [np.arange(5) == 2] * 2, 0)
    np.testing.assert_allclose(scores[ALL_HEADS][0], (masses + bias).mean((1, 2)), atol=1e-6)
    np.testing.assert_allclose(scores[CALIBRATED][0], view.icr_C)


def test_tokens_far_below_the_mean_are_left_out_of_calibrated_attention() -> None:
    tokens = np.full((2, 1, 1, 20), 0.1, np.float32)
    tokens[..., 3] = -0.9
    nothing = Look(np.zeros(1), np.zeros(1), (np.zeros_like(tokens),))
    view = View.of(Look(np.zeros(1), np.zeros(1), (tokens,)), nothing)
    assert view.icr_C[0] == pytest.approx(1.9)
    assert view.masses_CF[0] == pytest.approx([1.0, 1.0])


def test_measures_of_a_ranking() -> None:
    scores = np.array([0.5, 0.9, 0.1, 0.7])  # ranks 3, 1, 4, 2
    needed = np.array([True, True, False, False])
    found = measures(scores, needed, 0, 2)
    ideal = 1 + 1 / np.log2(3)
    assert found == pytest.approx({"all_needed": 0, "recall": 0.5, "ndcg_at_10": (1 + 0.5) / ideal})
    assert measures(scores, needed, 0, 3)["all_needed"] == 1
    missing = measures(scores, needed, 1, 3)
    assert missing["all_needed"] == 0 and missing["recall"] == pytest.approx(2 / 3)
    tied = measures(np.array([1.0, -np.inf, -np.inf]), np.array([False, False, True]), 0, 2)
    assert tied["recall"] == 0.0 and tied["ndcg_at_10"] == 0.5, "ties stay in the order of the candidates"


def test_neighbours_in_the_document_raise_a_score(path: Path) -> None:
    question = read_questions(path)[5]
    assert question.retrieved == ((0, 0), (0, 2), (1, 0), (1, 1))
    raised = with_neighbours(question, np.array([1.0, 0.2, 0.4, -np.inf]))
    assert raised.tolist() == [1.0, 0.2, 0.4, -np.inf]
    raised = with_neighbours(question, np.array([1.0, 0.2, 0.4, 0.1]))
    assert raised == pytest.approx([1.0, 0.2, 0.45, 0.3])


def test_fused_ranking_is_between_both() -> None:
    both = fused(np.array([3.0, 2.0, 1.0]), np.array([10.0, 30.0, 20.0]))
    assert both.argsort().tolist() == [2, 0, 1]


def test_tables_show_paired_differences_to_search() -> None:
    values = {SEARCH: [1, 0, 0, 1], "chance": [0, 0, 1, 0]}
    outcomes = [
        Outcome(arm, kind, {"right": float(one)})
        for arm, rights in values.items()
        for one, kind in zip(rights, ["a", "b", "a", "b"], strict=True)
    ]
    tables = tables_of(outcomes, [{SEARCH: 0.02, "full prefill": 0.01}, {SEARCH: 0.04, "looking": 0.01}], 5)
    shown, difference, cost = tables.values()
    assert [one["ranking"] for one in shown] == [SEARCH, "chance"] and list(shown[0]) == ["ranking", "a", "b", "all"]
    interval = bootstrapped(np.array([-1.0, 0.0, 1.0, -1.0]))
    assert [one["ranking"] for one in difference] == ["chance"]
    assert difference[0]["a"].startswith("+0.000") and difference[0]["b"].startswith("-0.500")
    assert difference[0]["all"] == f"-0.250 ({interval.low:+.3f} to {interval.high:+.3f})"
    assert [one["what"] for one in cost] == [SEARCH, "full prefill", "looking"]
    assert [one["p50"] for one in cost] == ["30.00 ms", "10.00 ms", "10.00 ms"]
    assert cost[1]["ratio to search"] == "0.5" and cost[2]["ratio to full prefill"] == "-"


def test_nothing_to_rank_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--questions, or a data set with --dataset"):
        run_looking(LookingOptions(), tmp_path, StillroomConfig())
    plain = write(path, [{**OTHER, "needed": []}])
    with pytest.raises(UsageError, match="no question names the chunks"):
        run_looking(LookingOptions(plain), tmp_path, StillroomConfig())


@pytest.mark.slow  # loads the embedder and the reader
def test_every_ranking_is_measured(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "set"
    data.mkdir()
    write(data / "corpus.jsonl", [{"_id": f"d{at}", "text": text} for at, text in enumerate(DOCUMENT)])
    write(data / "queries.jsonl", [{"_id": "q", "text": "Who took a post at Jecko Bank ?"}])
    (data / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\td4\t1\n")
    said: list[str] = []
    options = LookingOptions(path, (data,), num_candidates=6)
    result = run_looking(options, tmp_path / "work", StillroomConfig(), said.append)
    assert "7 of 7 questions answered" in said

    ways = [LIKELIHOOD, f"{SEARCH} and {LIKELIHOOD}", f"{SEARCH} and both", ALL_HEADS, CALIBRATED, BEST_HEAD]
    expected = {SEARCH, looking.NEIGHBOURS, looking.CROSS_ENCODER, looking.CHANCE, looking.NEEDED}
    expected |= {f"{way}, {context}" for way in ways for context in (looking.ALONE, looking.IN_DOCUMENT)}
    assert expected <= set(result.samples.values)
    rights = result.samples.of(looking.NEEDED, "right")
    assert len(rights) == 7 and sum(rights) >= 5, "the model answers from what it needs"
    assert result.samples.of(SEARCH, "ndcg_at_10") == [1.0], "the words stand in one passage of the data set"
    assert f"{LIKELIHOOD}, {looking.ALONE}" not in [one["ranking"] for one in result.tables["nDCG@10, one grade"]], (
        "the bundled model cannot read data sets"
    )
    names = [one["what"] for one in result.tables["Cost of a question"]]
    assert names[:3] == [SEARCH, looking.CROSS_ENCODER, "looking, for likelihood"] and len(names) == 5
    assert str(tmp_path) not in json.dumps(result.to_json()["parameters"])
    assert CONTENT_FREE in " ".join(result.notes)
