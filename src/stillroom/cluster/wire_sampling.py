"""Sampling parameters as JSON: the fields of `SamplingParams` that differ from their defaults."""

from dataclasses import MISSING, fields
from typing import Any

from stillroom.cluster.wire_reading import Fields, integer, items, number, row, tokens
from stillroom.core.request import SamplingParams
from stillroom.errors import UsageError, WireError


def sampling_to_json(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from their defaults."""
    found = {}
    for one in fields(sampling):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        if (value := getattr(sampling, one.name)) != default:
            found[one.name] = value
    if "logit_bias" in found:
        found["logit_bias"] = [[token_id, bias] for token_id, bias in sampling.logit_bias.items()]
    return found


def read_sampling(value: Any, where: str) -> SamplingParams:
    given = Fields(value, where)
    found: dict[str, Any] = {}
    biases: tuple[tuple[int, float], ...] | None = given.read_or("logit_bias", items(_read_bias), None)
    if biases is not None:
        found["logit_bias"] = dict(biases)
    for one in fields(SamplingParams):
        if one.name != "logit_bias":
            reader = integer if one.type in (int, int | None) else number
            found[one.name] = given.read_or(one.name, reader, one.default)
    given.close()
    try:
        return SamplingParams(**found)
    except UsageError as error:
        raise WireError(f"{where}: {error}") from None


def _read_bias(value: Any, where: str) -> tuple[int, float]:
    token_id, bias = row(value, where, 2)
    return tokens([token_id], where)[0], number(bias, f"{where}[1]")
