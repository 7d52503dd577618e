"""Machine models of `stillroom bench simulate`: data files with sourced numbers, and the costs derived from them.

A step of `new` tokens behind `cached` tokens takes

    T(cached, new) = step + max(2 P new / F, 2 W / M) + max(4 L H D new (cached + new / 2) / F, K (cached + new) / M)

with P parameters multiplied per token and W parameters read per step (2 bytes each), F operations per second, M bytes
per second of memory, L layers of H heads of size D, and K bytes of KV per token. Matrices and attention each take the
longer of arithmetic and memory time (the roofline model).
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from stillroom.core.kv import Link, Tier
from stillroom.errors import UsageError
from stillroom.kvcache.tree.cost_model import CostProfile

_WIDTH = 2
"""Bytes of a parameter and of a number of KV."""
_NEW = (1, *sorted(base * 2**power for base in (2, 3) for power in range(15)))
_MODEL = ("layers", "heads", "kv_heads", "head_dim", "parameters", "parameters_per_token", "max_tokens")
_MACHINE = ("flops_per_second", "memory_bytes_per_second", "step_seconds", "device_bytes", "host_bytes", "disk_bytes")
_LINK = ("latency_seconds", "bytes_per_second")
_MAY_BE_ZERO = ("step_seconds", "host_bytes", "disk_bytes", "latency_seconds")


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a data file."""

    value: float
    source: str
    """A paper's figure or section, a data sheet, a computation, or a statement that it is an assumption."""


@dataclass(frozen=True)
class Machine:
    """A model on its hardware."""

    name: str
    numbers: Mapping[str, Number]
    """Numbers by table and key of the data file, such as `model.layers`."""

    def __getitem__(self, key: str) -> float:
        return self.numbers[key].value

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token: keys and values of all layers."""
        return round(2 * self["model.layers"] * self["model.kv_heads"] * self["model.head_dim"] * _WIDTH)

    def step_seconds(self, num_cached: int, num_new: int) -> float:
        """Return T(cached, new) of the module's docstring."""
        flops, memory = self["machine.flops_per_second"], self["machine.memory_bytes_per_second"]
        matrices = 2 * self["model.parameters_per_token"] * num_new / flops
        weights = _WIDTH * self["model.parameters"] / memory
        pairs = num_new * (num_cached + num_new / 2)
        scores = 4 * self["model.layers"] * self["model.heads"] * self["model.head_dim"] * pairs / flops
        kept = self.bytes_per_token * (num_cached + num_new) / memory
        return self["machine.step_seconds"] + max(matrices, weights) + max(scores, kept)

    def _balanced_tokens(self) -> float:
        """Return the number of new tokens at which matrix arithmetic takes as long as reading the weights."""
        intensity = self["machine.flops_per_second"] / self["machine.memory_bytes_per_second"]
        return intensity * _WIDTH * self["model.parameters"] / (2 * self["model.parameters_per_token"])

    def costs(self) -> CostProfile:
        """Return the cost profile on a grid fine enough for linear interpolation, with the links."""
        bend = self._balanced_tokens()
        counts = tuple(sorted({*_NEW, math.floor(bend), math.ceil(bend)} - {0}))
        cached = (0, *_NEW[4:])
        seconds = tuple(tuple(self.step_seconds(before, new) for new in counts) for before in cached)
        links = {
            tier: Link(*(self[f"links.{tier.label}.{key}"] for key in _LINK))
            for tier in (Tier.HOST, Tier.DISK)
            if f"links.{tier.label}.bytes_per_second" in self.numbers
        }
        return CostProfile(cached, counts, seconds, links)


def machine_names() -> list[str]:
    """Return the names of the package's data files."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml"))


def load_machine(name: str) -> Machine:
    """Load a machine of the package, or of a data file.

    Args:
        name: one of `machine_names`, or a path that ends in `.toml`.

    Raises:
        UsageError: the machine is unknown, or the file is invalid; the message names the entry.
    """
    file: Traversable = Path(name) if name.endswith(".toml") else _folder() / f"{name}.toml"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"unknown machine {name!r}; known are {', '.join(machine_names())}, or a .toml file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} cannot be read: {error}") from None
    return read_machine(content, name)


def read_machine(content: Mapping[str, Any], where: str) -> Machine:
    """Build a machine from the content of a data file; raises as `load_machine`."""
    title = content.get("name")
    if not isinstance(title, str) or not title:
        raise UsageError(f"{where}: `name`, which names model and machine, must be a text")
    links = content.get("links", {})
    tables = {"model": (content.get("model"), _MODEL), "machine": (content.get("machine"), _MACHINE)}
    tables |= {f"links.{tier}": (table, _LINK) for tier, table in _table(links, "links", where).items()}
    if unknown := set(content) - {"name", "model", "machine", "links"} | set(links) - {"host", "disk"}:
        raise UsageError(f"{where}: unknown {', '.join(sorted(unknown))}")
    numbers: dict[str, Number] = {}
    for name, (table, keys) in tables.items():
        entries = _table(table, name, where)
        if missing := [key for key in keys if key not in entries]:
            raise UsageError(f"{where}: [{name}] lacks {', '.join(missing)}")
        if unknown := set(entries) - set(keys):
            raise UsageError(f"{where}: [{name}] has unknown {', '.join(sorted(unknown))}")
        numbers |= {f"{name}.{key}": _number(entries[key], f"{where}: {name}.{key}", key) for key in keys}
    for tier in ("host", "disk"):
        if numbers[f"machine.{tier}_bytes"].value and f"links.{tier}.bytes_per_second" not in numbers:
            raise UsageError(f"{where}: machine.{tier}_bytes needs a table [links.{tier}]")
    return Machine(title, numbers)


def _table(value: Any, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: the table [{name}] is missing")
    return value


def _number(entry: Any, where: str, key: str) -> Number:
    if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
        raise UsageError(f"{where} must be written as {{ value = 1.0, source = 'where it is from' }}")
    value, source = entry["value"], entry["source"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{where}: {value!r} is not a finite number")
    if value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        raise UsageError(f"{where}: {value} must be {'at least' if key in _MAY_BE_ZERO else 'more than'} 0")
    if not isinstance(source, str) or not source.strip():
        raise UsageError(f"{where}: the source of {value} must be a text")
    return Number(float(value), source)


def _folder() -> Traversable:
    return resources.files("stillroom_bench.experiments") / "machine_profiles"
