"""When audits suspend placing, and when it returns, by simulated agreement."""

import random

from stillroom.engine.reuse_level import ReuseLevel
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions

PREPARED = AnywhereOptions(0.0, "first", only_prepared=True)


class Simulation:
    """A level of prepared KV whose answers disagree with a given probability."""

    def __init__(self, seed: int, limit: float = 0.25) -> None:
        self.allowed: list[AnywhereOptions] = []
        self.level = ReuseLevel(PREPARED, self.allowed.append, limit)
        self._randomness = random.Random(seed)

    def count(self, rate: float, num_audits: int) -> list[int]:
        """Count audits; return after how many of them placing was suspended or resumed."""
        return [number for number in range(num_audits) if self.level.count(agrees=self._randomness.random() >= rate)]

    def count_until_change(self, rate: float) -> int:
        """Return after how many audits placing was suspended or resumed."""
        number = 1
        while not self.count(rate, 1):
            number += 1
        return number


def test_prepared_kv_is_suspended_at_once_and_its_options_stay() -> None:
    simulation = Simulation(1)
    assert simulation.count(1.0, 6) == [3]
    assert simulation.level.is_suspended and simulation.level.options == PREPARED and not simulation.allowed


def test_chance_alone_does_not_suspend() -> None:
    wrong = sum(bool(Simulation(seed).count(0.25, 300)) for seed in range(200))
    assert wrong / 200 <= 0.05


def test_twice_the_limit_suspends_soon() -> None:
    first = [Simulation(seed).count(0.5, 200)[:1] for seed in range(100)]
    assert sorted(found[0] if found else 200 for found in first)[95] < 160


def test_placing_returns_after_the_patience_and_fails_ever_more_rarely() -> None:
    simulation, gaps = Simulation(2), list[int]()
    for _ in range(4):
        assert simulation.count_until_change(1.0) <= 10 and simulation.level.is_suspended
        gaps.append(simulation.count_until_change(0.02))
        assert not simulation.level.is_suspended
    assert gaps == [100, 200, 400, 800]


def test_placing_returns_however_long_it_was_wrong() -> None:
    simulation = Simulation(3)
    simulation.count(0.6, 3000)
    assert simulation.level.is_suspended
    (returned,) = simulation.count(0.0, 700)
    assert returned < 600


def test_placing_stays_suspended_while_nearly_too_many_differ() -> None:
    simulation = Simulation(4)
    simulation.count(1.0, 10)
    assert simulation.count(0.2, 3000) == [] and simulation.level.is_suspended
