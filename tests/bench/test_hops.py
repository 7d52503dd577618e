"""`stillroom bench hops`: its arms, its parts, and a run with the bundled reader."""

import json
from pathlib import Path

import pytest

from stillroom.config.settings import SearchConfig, StillroomConfig
from stillroom.errors import UsageError
from stillroom.models.bundled_models import READER
from stillroom_bench.quality.hops import HopArm, hop_arms, is_for_test, run_hops
from stillroom_bench.quality.quality_options import HopsOptions

SONG = "{song} is a song that the band {band} recorded in 1984."
BAND = "{singer} leads {band} and plays the organ."
FACTS = [
    ("Night Train", "The Lamps", "Mara Visser"),
    ("Blue Harbour", "The Ropes", "Iris Okafor"),
    ("Paper Moon Street", "The Kettles", "Tomas Lind"),
    ("Cold Orchard", "The Weavers of Hoorn", "Anna Petit"),
    ("Seven Bridges", "The Copper Owls", "Jon Abara"),
    ("Winter Ferry", "The Tall Hats", "Lea Moreau"),
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [
        {
            "question": f"Who leads the band that recorded {song}?",
            "answers": [singer],
            "ctxs": [{"title": "", "text": text.format(song=song, band=band, singer=singer)} for text in (SONG, BAND)],
        }
        for song, band, singer in FACTS
    ]
    (tmp_path / "questions.json").write_text(json.dumps(rows), encoding="utf-8")
    return tmp_path / "questions.json"


def test_one_hop_with_as_many_chunks_is_an_arm_of_each_mode_of_reuse() -> None:
    assert hop_arms((3, 2), 5, (None,)) == [
        HopArm(1, 5, None),
        HopArm(2, 5, None),
        HopArm(3, 5, None),
        HopArm(1, 15, None),
    ]
    names = [arm.name for arm in hop_arms((2,), 4, ("off", "exact"))]
    assert names == [
        f"{mode}/{own}" for mode in ("off", "exact") for own in ("1 hop, 4 chunks each", "2 hops, 4 chunks each")
    ] + [f"{mode}/1 hop, 8 chunks each" for mode in ("off", "exact")]
    assert hop_arms((1,), 5, (None,)) == [HopArm(1, 5, None)]


def test_parts_are_a_fixed_third_and_the_others() -> None:
    asked = [f"question {number}" for number in range(600)]
    assert 370 < sum(map(is_for_test, asked)) < 430
    assert [is_for_test(f"question {number}") for number in range(6)] == [is_for_test(one) for one in asked[:6]]


def test_second_hop_answers_what_one_search_cannot(questions: Path, tmp_path: Path) -> None:
    config = StillroomConfig(search=SearchConfig(top_k=1))
    options = HopsOptions(questions=questions, hops=(2,))
    result = run_hops(options, tmp_path / "work", config)
    num_asked = sum(is_for_test(f"Who leads the band that recorded {song}?") for song, _, _ in FACTS)
    assert result.parameters["num_questions"] == num_asked >= 3
    once, twice = (result.samples.values[name] for name in ("1 hop, 1 chunks each", "2 hops, 1 chunks each"))
    assert set(once["searches"]) == {1.0} and set(twice["searches"]) <= {1.0, 2.0}
    assert sum(twice["quoted"]) > sum(once["quoted"])
    assert sum(twice["is_retrieved"]) > sum(once["is_retrieved"])
    assert all(more >= less > 0 for more, less in zip(twice["prompt_tokens"], once["prompt_tokens"], strict=True))
    assert {row["arm"] for row in result.tables["Answers"]} == set(result.samples.values)
    assert {row["against"] for row in result.tables["Against one hop"]} == {
        "1 hop, 1 chunks each",
        "1 hop, 2 chunks each",
    }


def test_reuse_of_a_model_without_kv_is_refused(questions: Path, tmp_path: Path) -> None:
    options = HopsOptions(questions=questions, model=READER, reuse=("exact",))
    with pytest.raises(UsageError, match="--reuse has no effect with bundled:reader"):
        run_hops(options, tmp_path / "work", StillroomConfig())
