"""Tests that `calibrate --quality` measures with every configured setting that answers depend on."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from stillroom.answer_quality.alpha import find_alpha
from stillroom.answer_quality.asking import QualityOptions, engine_settings
from stillroom.config.settings import ReuseConfig, RuntimeConfig

ROWS = [
    {
        "chunks": [
            "As a student Pis Jurs chose grammar . He later moved to Ranholm .",
            "The birth of him is dated 1732 . For many years he served Ceckis Glass .",
            "The birthplace of Mulo Trallow was Sanwick . He bought the ship Pisent .",
            "He took a post at Jecko Bank . He earned a living as a printer .",
        ],
        "question": "Which company employed Pis Jurs ?",
        "answer": "Ceckis Glass",
    },
]
"""Four chunks, because focus selects only among three or more."""


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_documents_outside_the_configured_focus_are_not_recomputed(questions: Path) -> None:
    shares = []
    for window in (0, 1):
        scope = QualityOptions(questions, reuse=ReuseConfig(focus_window=window), alphas=(1.0,), max_tokens=2)
        shares.append(find_alpha(scope, 0.0).cells[0].mean_overhead)
    assert shares[1] < shares[0]


OTHER_VALUES = {"scheduling": "cache_first", "dtype": "bfloat16", "weights": "int8", "mode": "off", "policy": "lru"}
OTHER_VALUES |= {
    "recompute_budget": "cfo",
    "token_selector": "first",
    "preload": "layers",
    "load": "measured",
    "kv_tier": "redis://host",
}
OVERRIDDEN = {"kv_bytes", "mode", "audit_share", "load", "host_bytes", "disk_bytes"}
"""Settings of KV storage that a calibration overrides, because it places every document."""


@pytest.mark.parametrize("section", ["runtime", "reuse"])
def test_every_other_setting_reaches_the_measured_engine(section: str) -> None:
    default: Any = RuntimeConfig() if section == "runtime" else ReuseConfig()
    for field in fields(default):
        value = getattr(default, field.name)
        if isinstance(value, bool):
            other: object = not value
        elif isinstance(value, str):
            other = OTHER_VALUES.get(field.name, "other")
        else:
            other = value / 2 if isinstance(value, float) and value else value + 1
        option: dict[str, Any] = {field.name: other}
        changed = replace(default, **option)
        options: dict[str, Any] = {section: changed}
        runtime, reuse = engine_settings(QualityOptions(Path("questions.jsonl"), **options))
        measured = getattr(runtime if section == "runtime" else reuse, field.name)
        if field.name in OVERRIDDEN:
            continue
        assert measured == other, field.name
