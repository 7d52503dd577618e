"""Tests the evaluation of a model, its report and card, and bundling."""

import json
import random
from pathlib import Path

import pytest

from stillroom.answer_quality.questions import ChunkQuestion
from stillroom.errors import ModelNotFoundError
from stillroom.models import bundled_models
from stillroom.models.checkpoint import resolve
from tests.training.test_trainer import QUICK, RECIPE
from training.bundle import REQUIRED, bundle
from training.card import card
from training.checkpoint import read_log
from training.data.worlds import SILENT
from training.evaluation.ask import Asked
from training.evaluation.evaluate import evaluate
from training.evaluation.report import as_markdown
from training.evaluation.score import figures
from training.export import export_run
from training.intervals import mean_by_group
from training.trainer import Trainer


def asked(answer: str, accepted: str, kind: str = "xquad", group: str = "a") -> Asked:
    return Asked(ChunkQuestion((), "?", (accepted,), kind), group, answer)


def test_answers_are_scored_as_in_squad() -> None:
    found = figures("xquad", [asked("The 308 points.", "308 points"), asked("308", "308 points", group="b")])
    assert [(one.name, one.interval.value) for one in found[:2]] == [
        ("xquad exact match", 0.5),
        ("xquad F1", pytest.approx((1 + 2 / 3) / 2)),
    ]
    assert found[0].is_reached and found[0].num_groups == 2
    (silent,) = figures("unanswerable", [asked(SILENT.lower(), SILENT), asked("Paris", SILENT)])
    assert silent.interval.value == 0.5 and not silent.is_reached
    worlds = figures("microworld", [asked("x", "x", "single"), asked("y", "x", "split"), asked("x", "x", "single")])
    assert {one.name: one.interval.value for one in worlds} == {"microworld single": 1.0, "microworld split": 0.0}


def test_interval_resamples_groups() -> None:
    rng = random.Random(0)
    values = [float(rng.random() < 0.5) for _ in range(400)]
    alone = mean_by_group(values, [str(n) for n in range(400)])
    assert alone.low < 0.5 < alone.high and 0.07 < alone.high - alone.low < 0.13
    same = [float(group % 2) for group in range(20) for _ in range(20)]
    grouped = mean_by_group(same, [str(n // 20) for n in range(400)])
    assert grouped.value == 0.5 and grouped.high - grouped.low > 3 * (alone.high - alone.low)
    assert mean_by_group([1.0, 1.0], ["a", "b"]).low == 1.0


@pytest.fixture(scope="module")
def run(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    Trainer(RECIPE, QUICK, small_data, folder).train()
    return folder


@pytest.fixture(scope="module")
def model(run: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(run, small_data, tmp_path_factory.mktemp("exported") / "model", RECIPE)


def test_checkpoint_answers_every_set(small_data: Path, model: Path) -> None:
    """An untrained model has every figure and reaches no target."""
    report = evaluate(str(model), small_data, limit=2, device="cpu", say=lambda line: None)
    assert [row["name"] for row in report["figures"]][:2] == ["xquad exact match", "xquad F1"]
    assert all(row["questions"] in (1, 2) and row["is reached"] in (False, None) for row in report["figures"])
    assert "| unanswerable | 0.000 |" in as_markdown(report)


def test_card_names_run_data_and_excluded_sources(run: Path, small_data: Path) -> None:
    manifest = json.loads((small_data / "manifest.json").read_text())
    text = card("english", manifest, read_log(run), None)
    assert "license: cc-by-sa-4.0" in text and "Not evaluated." in text
    assert "6 steps of 2 rows of 320 tokens" in text and manifest["held out"][0] in text
    assert "fiqa-mini" in text, "what was left out, too"
    with pytest.raises(ValueError, match="do not belong together"):
        card("english", manifest | {"digest": "another"}, read_log(run), None)


def test_finished_model_is_copied_into_the_package(model: Path, tmp_path: Path) -> None:
    package = tmp_path / "models"
    (package / "bundled").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"lacks README\.md"):
        bundle(model, "english", into=package / "bundled")
    (model / "README.md").write_text("card")
    with pytest.raises(ValueError, match="is not a folder name"):
        bundle(model, "../english", into=package / "bundled")
    out = bundle(model, "english", into=package / "bundled")
    assert {path.name for path in out.iterdir()} >= set(REQUIRED)
    bundle(out, "english", into=package / "bundled")
    assert {path.name for path in out.iterdir()} >= set(REQUIRED), "the folder that it replaces is the one it copies"
    assert list(out.parent.iterdir()) == [out]


def test_bundled_model_can_be_chosen_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("microworld", "english"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(bundled_models, "FOLDER", tmp_path)
    monkeypatch.setattr(bundled_models, "DEFAULT", "microworld")
    assert bundled_models.bundled_names() == ["english", "microworld"]
    assert resolve("bundled") == resolve("bundled:microworld") == tmp_path / "microworld"
    assert resolve("bundled:english") == tmp_path / "english"
    monkeypatch.setattr(bundled_models, "DEFAULT", "english")
    assert resolve("bundled") == tmp_path / "english"
    for wrong in ("bundled:notes", "bundled:", "bundled:../english"):
        with pytest.raises(ModelNotFoundError, match="bundled:english, bundled:microworld"):
            resolve(wrong)


def test_package_contains_its_default_model() -> None:
    assert bundled_models.DEFAULT in bundled_models.bundled_names()
    folder = bundled_models.bundled_folder("bundled")
    assert folder is not None and (folder / "README.md").is_file()
