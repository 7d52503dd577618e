"""Times and rates of the papers that no number of the modelled machines was taken from, beside what the model gives.

What was taken from the papers is in `machine_profiles/`: each number names its figure. docs/simulate-bench.md lists
both, with the errors.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stillroom.planner.simulation.stepped_engine import EnginePolicy
from stillroom_bench.experiments.experiment_options import SimulateOptions
from stillroom_bench.experiments.machines import Machine, load_machine
from stillroom_bench.experiments.reuse_figures import sustained_rate
from stillroom_bench.experiments.simulated_cases import OVERLOAD, RATES, VLLM, Case, Say, Tables, ragcache_case

_RECOMPUTED = 0.25
"""Of the tokens, in Cache-Craft's Figure 23 (5.4)."""
_PROMPT = 3300
"""Median tokens of a prompt of Sys-X (Cache-Craft 5.1.2)."""
_DEVICES = 4
"""Of the machine of LLaMA-3-70B."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A figure that was not an input."""

    source: str
    quantity: str
    paper: float
    modelled: float

    @property
    def error(self) -> float:
        return self.modelled / self.paper - 1


def modelled_times() -> list[HeldOut]:
    """Return what follows from the formula of a step alone.

    Figure 23 has four prompts at once. 12 billion tokens in 9,600 hours (Cache-Craft 1) are read as hours of one GPU:
    at the price of eight of them that gives the paper's 50,000 dollars.
    """
    small, large = load_machine("llama3-8b-a100"), load_machine("llama3-70b-4xa100")
    per_device = _PROMPT / large.step_seconds(0, _PROMPT) / _DEVICES
    ratio = "computing everything / a quarter, 4 prompts of"
    return [
        HeldOut("Cache-Craft Figure 23b", f"LLaMA-3-8B, {ratio} 8,192", 1.6, _speed_up(small, 8192)),
        HeldOut("Cache-Craft Figure 23b", f"LLaMA-3-70B, {ratio} 8,192", 2.3, _speed_up(large, 8192)),
        HeldOut("Cache-Craft Figure 23c", f"LLaMA-3-8B, {ratio} 16,384", 1.7, _speed_up(small, 16_384)),
        HeldOut("Cache-Craft 1", "LLaMA-3-70B, prompt tokens per second and GPU", 12e9 / 9600 / 3600, per_device),
    ]


def _speed_up(machine: Machine, num_tokens: int, num_prompts: int = 4) -> float:
    """Return the time of computing prompts in one step, divided by that of recomputing a quarter of their tokens."""

    def seconds(cached: int, new: int) -> float:
        alone = machine.step_seconds(0, 1)
        return alone + num_prompts * (machine.step_seconds(cached, new) - alone)

    num_new = round(_RECOMPUTED * num_tokens)
    return seconds(0, num_tokens) / seconds(num_tokens - num_new, num_new)


def _simulated_rates(options: SimulateOptions, say: Say) -> Iterator[HeldOut]:
    """Yield the rates that RAGCache 7.2 and 7.3 name, in requests per second."""
    slots = {"llama2-70b-2xh800": (4, 1.5), "mixtral-8x7b-2xh800": (8, 2.0)}
    for name, (max_seqs, paper) in slots.items():
        say(f"held out, {name}")
        case = ragcache_case(name, "mmlu", 2, options, max_seqs)
        yield HeldOut("RAGCache 7.2", f"{name}, vLLM sustains", paper, _sustained(case, VLLM))
    for curve, paper in (("mmlu", 2.5), ("nq", 1.4)):
        say(f"held out, mistral-7b-a10g, {curve}")
        case = ragcache_case("mistral-7b-a10g", curve, 2, options)
        quantity = f"mistral-7b-a10g, {curve}, RAGCache sustains a little less than"
        yield HeldOut("RAGCache 7.3", quantity, paper, _sustained(case, case.ragcache()))


def _sustained(case: Case, system: EnginePolicy) -> float:
    rates = [rate * case.service_rate() for rate in RATES]
    means = [one.mean for one in case.run(system, rates)]
    return sustained_rate(list(zip(rates, means, strict=True)), OVERLOAD * means[0])


def held_out(options: SimulateOptions, say: Say) -> Tables:
    """Compare all of them."""
    found = [*modelled_times(), *_simulated_rates(options, say)]
    rows = [
        {"figure": one.source, "quantity": one.quantity, "paper": one.paper, "modelled": one.modelled}
        | {"error": f"{one.error:+.0%}"}
        for one in found
    ]
    return {"Figures that were not inputs": rows}
