"""Tests machine data files: every number has a source, and the costs reproduce the papers' times."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.kv import Tier
from stillroom.errors import UsageError
from stillroom_bench.experiments.held_out import modelled_times
from stillroom_bench.experiments.machines import load_machine, machine_names, read_machine

NAMES = machine_names()
ERRORS = [130, 67, 101, 212]
"""Percent, of `modelled_times`."""


def _content() -> dict[str, Any]:
    numbers = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "parameters": 1000, "parameters_per_token": 900}
    machine = {"flops_per_second": 1e6, "memory_bytes_per_second": 1e5, "step_seconds": 0.5, "device_bytes": 1000}
    link = {"latency_seconds": 0.25, "bytes_per_second": 100.0}

    def sourced(table: dict[str, float]) -> dict[str, Any]:
        return {key: {"value": value, "source": "by hand"} for key, value in table.items()}

    return {
        "name": "made",
        "model": sourced({**numbers, "max_tokens": 64}),
        "machine": sourced({**machine, "host_bytes": 1, "disk_bytes": 0}),
        "links": {"host": sourced(link)},
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_of_the_package_is_valid(name: str) -> None:
    machine = load_machine(name)

    assert machine.costs().prefill_seconds(0, 1) > 0
    assert all(len(number.source) > 8 for number in machine.numbers.values())


def test_costs_return_the_figures_that_were_their_inputs() -> None:
    """RAGCache Figures 2 and 4, Table 1; Cache-Craft Figure 2: the machines were solved for these, so this says that
    formula, files and interpolation agree, and nothing about how good the model is."""
    llama, mistral = load_machine("llama2-7b-a10g"), load_machine("mistral-7b-a10g")
    costs = llama.costs()

    assert costs.prefill_seconds(0, 4000) == pytest.approx(1.0, rel=0.01)
    full, hit = costs.prefill_seconds(0, 4128), costs.prefill_seconds(4096, 32)
    assert full / hit == pytest.approx(11.5, rel=0.01)
    assert full / (hit + costs.load_seconds(Tier.HOST, 4096 * llama.bytes_per_token)) == pytest.approx(3.9, rel=0.01)
    assert (llama.bytes_per_token, mistral.bytes_per_token) == (2**19, 2**17)
    eight = 8 * load_machine("llama3-70b-4xa100").step_seconds(0, 32_768)
    assert eight == pytest.approx(76, rel=0.01)


def test_errors_on_figures_that_were_not_inputs_are_those_of_the_documentation() -> None:
    """The model is far too optimistic about recomputing a part of a prompt, and about an A100 in production."""
    errors = [round(100 * one.error) for one in modelled_times()]
    page = (Path(__file__).resolve().parents[2] / "docs" / "simulate-bench.md").read_text(encoding="utf-8")

    assert errors == ERRORS
    assert all(f"| {error:+d} % |" in page for error in errors)
    inputs = " ".join(number.source for name in NAMES for number in load_machine(name).numbers.values())
    assert not [one.source for one in modelled_times() if f"{one.source}:" in inputs]


def test_step_time_equals_hand_computed_value() -> None:
    machine = read_machine(_content(), "made")

    matrices, weights = 2 * 900 * 10 / 1e6, 2 * 1000 / 1e5
    scores, kept = 4 * 2 * 4 * 8 * 10 * (20 + 5) / 1e6, 2 * 2 * 2 * 8 * 2 * 30 / 1e5
    assert (matrices < weights, scores > kept) == (True, True)
    assert machine.step_seconds(20, 10) == pytest.approx(0.5 + weights + scores)
    assert machine.costs().load_seconds(Tier.HOST, 50) == 0.75


@given(st.sampled_from(NAMES), st.integers(0, 8192), st.integers(1, 8192))
def test_interpolated_costs_are_close_to_the_model(name: str, cached: int, new: int) -> None:
    machine = _MACHINES[name]

    assert _COSTS[name].prefill_seconds(cached, new) == pytest.approx(machine.step_seconds(cached, new), rel=0.01)


_MACHINES = {name: load_machine(name) for name in NAMES}
_COSTS = {name: machine.costs() for name, machine in _MACHINES.items()}


def _without(*path: str) -> dict[str, Any]:
    content = _content()
    table = content
    for key in path[:-1]:
        table = table[key]
    del table[path[-1]]
    return content


def _with(value: Any, *path: str) -> dict[str, Any]:
    content = _content()
    table = content
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (_without("name"), "`name`"),
        (_without("model"), r"\[model\]"),
        (_with(3, "links"), r"\[links\]"),
        (_without("model", "heads"), "lacks heads"),
        (_without("links", "host"), r"\[links.host\]"),
        (_with({"value": 1, "source": "x"}, "model", "haeds"), "unknown haeds"),
        (_with({}, "links", "tape"), "unknown tape"),
        (_with(5, "model", "heads"), "must be written as"),
        (_with({"value": 5, "source": " "}, "model", "heads"), "the source of 5"),
        (_with({"value": True, "source": "x"}, "model", "heads"), "not a finite number"),
        (_with({"value": float("inf"), "source": "x"}, "model", "heads"), "not a finite number"),
        (_with({"value": 0, "source": "x"}, "model", "heads"), "more than 0"),
        (_with({"value": -1, "source": "x"}, "machine", "host_bytes"), "at least 0"),
    ],
)
def test_invalid_data_file_is_refused_with_its_error(content: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_machine(content, "file.toml")


def test_unknown_machine_error_lists_known_machines(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mistral-7b-a10g"):
        load_machine("mistral")
    (tmp_path / "broken.toml").write_text("name = ")
    with pytest.raises(UsageError, match="cannot be read"):
        load_machine(str(tmp_path / "broken.toml"))
