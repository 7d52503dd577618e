"""Measures the costs of computing and loading KV on this machine, and saves them: `stillroom calibrate`.

T(cached, new) is timed with the engine's decoder, blocks and steps, so it includes all that a request pays for
(RAGCache 5.1: "profiles the LLM prefill time with varying cached and non-cached token lengths offline"). Without a
saved profile, a quick pass of about a second is used.
"""

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from stillroom.core.batch import Batch, SampleSpec, ScheduledSequence
from stillroom.core.clock import Clock
from stillroom.core.ids import BlockId, RequestId
from stillroom.core.kv import Link, NodeCopy, NodeKey, NodeRecord, Tier
from stillroom.core.request import SamplingParams
from stillroom.errors import ModelError, UsageError
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvstore.device import DeviceStore
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.host import HostStore
from stillroom.kvstore.tiered_store import TieredStore
from stillroom.runner.torch_runner import TorchRunner

CACHED = (0, 128, 512, 1024, 2048)
NEW = (1, 16, 64, 256, 1024)
_FORMAT = 1
_SCRATCH = ".stillroom-calibrate-"
_SCRATCH_SECONDS = 3600.0
"""Scratch folders older than this were left by killed processes."""


@dataclass(frozen=True, slots=True)
class CalibrationTarget:
    """The runner, device and limits that are measured."""

    runner: TorchRunner
    device: DeviceStore
    """Precondition: not in use. Its contents are overwritten."""
    num_blocks: int
    max_model_len: int
    step_tokens: int
    """Token budget of one step."""
    clock: Clock

    @property
    def num_slots(self) -> int:
        """Capacity of the device in tokens."""
        return self.num_blocks * self.device.block_size


def calibrate(
    target: CalibrationTarget,
    folder: Path,
    *,
    repeat: int = 5,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CostProfile:
    """Measure the whole grid, the median of `repeat` runs for each point, and the bandwidths to host and disk.

    Args:
        folder: on the disk that stores KV. Temporary files are written there and removed; if the folder is not
            writable, in the system's folder for temporary files.

    Raises:
        UsageError: the KV pool or the model is too small to measure.
    """
    limit = min(target.num_blocks * target.device.block_size, target.max_model_len) - 1
    cached = [count for count in CACHED if count < limit]
    new = [count for count in NEW if count <= limit - cached[-1]] or [1]
    while len(cached) > 2 and len(new) < 3:  # prefer more lengths of `new` to longer contexts
        cached.pop()
        new = [count for count in NEW if count <= limit - cached[-1]] or [1]
    if len(cached) < 2 or len(new) < 2:
        raise UsageError(f"{limit} tokens are too few to measure with; raise runtime.kv_bytes")
    _clear(target, cached[-1] + new[-1])
    step_seconds(target, 0, new[-1])  # compiles, allocates, warms up
    total = len(cached) * len(new) * repeat
    runs = np.empty((repeat, len(cached), len(new)))
    for done, (index, row, column) in enumerate(np.ndindex(runs.shape)):
        runs[index, row, column] = step_seconds(target, cached[row], new[column])
        on_progress(done + 1, total)
    seconds = np.median(runs, axis=0)
    return CostProfile(tuple(cached), tuple(new), tuple(map(tuple, seconds.tolist())), _links(target, folder))


def quick_profile(target: CalibrationTarget, folder: Path | None, *, budget_seconds: float = 1.0) -> CostProfile:
    """Measure T(0, new) for a few lengths, shortest first, until the budget is spent, and the extra time per cached
    token for one of them; the best of three runs each.

    Other work on the machine can only make a run longer. So the best run counts, and no length takes longer than a
    greater one.

    Args:
        folder: as in `calibrate`; None if KV is not stored on disk.
    """
    limit = min(target.num_blocks * target.device.block_size, target.max_model_len) - 1
    started = target.clock.monotonic()
    seconds: dict[int, float] = {}
    for new in (1, min(16, target.num_slots), 64, 256):
        if len(seconds) < 2 or (new <= limit and target.clock.monotonic() - started < budget_seconds):
            seconds[new] = _best(target, 0, new)
    lengths = list(seconds)
    for shorter, longer in reversed(list(pairwise(lengths))):
        seconds[shorter] = min(seconds[shorter], seconds[longer])
    before, new = min(1024, limit - lengths[-1]) // 2, lengths[-1]
    per_pair = 0.0
    if before > 0 and target.clock.monotonic() - started < budget_seconds:
        per_pair = max(_best(target, before, new) - seconds[new], 0.0) / (before * new)
    cached = (0, 1024)
    grid = tuple(tuple(seconds[new] + per_pair * count * new for new in lengths) for count in cached)
    return CostProfile(cached, tuple(lengths), grid, _links(target, folder))


def _best(target: CalibrationTarget, num_cached: int, num_new: int) -> float:
    _clear(target, num_cached + num_new)
    return min(step_seconds(target, num_cached, num_new) for _ in range(3))


def step_seconds(target: CalibrationTarget, num_cached: int, num_new: int) -> float:
    """Seconds to compute `num_new` tokens after `num_cached` ones, in the engine's steps, first token included."""
    end = num_cached + num_new
    assert end <= target.num_slots, "the slots lie outside the device's KV"
    tokens = np.arange(num_new, dtype=np.int64) % 32
    slots = np.arange(end, dtype=np.int64)
    started = target.clock.monotonic()
    for first in range(num_cached, end, target.step_tokens):
        last = min(first + target.step_tokens, end)
        samples = (_sample(tokens),) if last == end else ()
        piece = tokens[first - num_cached : last - num_cached]
        target.runner.execute(Batch((ScheduledSequence(RequestId("calibrate"), piece, first, slots[:last], samples),)))
    return target.clock.monotonic() - started


def sequence_seconds(target: CalibrationTarget, num_sequences: int = 8, repeat: int = 9) -> float:
    """Seconds that one more decoding sequence adds to a step: a step of `num_sequences` less a step of one, per
    sequence, of medians. 0 if there is no room for two sequences."""
    num_sequences = min(num_sequences, target.num_slots, target.step_tokens)
    if num_sequences < 2:
        return 0.0
    _clear(target, num_sequences)
    runs = np.array([[_decoding_seconds(target, count) for count in (1, num_sequences)] for _ in range(repeat + 1)])
    one, several = np.median(runs[1:], axis=0)  # the first warms up
    return max(0.0, float(several - one) / (num_sequences - 1))


def _decoding_seconds(target: CalibrationTarget, num_sequences: int) -> float:
    tokens = np.ones(1, dtype=np.int64)
    entries = []
    for number in range(num_sequences):
        name = RequestId(f"calibrate-{number}")
        sample = SampleSpec(name, SamplingParams(max_tokens=1), 0.0, tokens, 1)
        entries.append(ScheduledSequence(name, tokens, 0, np.array([number], dtype=np.int64), (sample,)))
    started = target.clock.monotonic()
    target.runner.execute(Batch(tuple(entries)))
    return target.clock.monotonic() - started


def check_logits(target: CalibrationTarget) -> None:
    """Compute a few tokens.

    Raises:
        ModelError: the logits are not finite.
    """
    tokens = np.arange(min(target.num_slots, target.max_model_len, target.step_tokens, 8), dtype=np.int64)
    sample = _sample(tokens)
    sequence = ScheduledSequence(sample.request_id, tokens, 0, tokens, (sample,))
    if target.runner.execute(Batch((sequence,))).non_finite:
        raise ModelError(
            "the model computes NaN: its weights are damaged, or runtime.dtype is too narrow for them; download the "
            "checkpoint again, or choose float32"
        )


# Saving profiles


def profile_path(root: Path, fingerprint: bytes, device: torch.device) -> Path:
    """File of the profile of a model on this machine, below the user's cache folder."""
    machine = "\0".join((platform.node(), platform.machine(), _processor(), str(os.cpu_count()), _accelerator(device)))
    name = f"{fingerprint.hex()[:24]}-{hashlib.sha256(machine.encode()).hexdigest()[:12]}.json"
    return root / "profiles" / name


def save_profile(path: Path, profile: CostProfile) -> None:
    content = {
        "format": _FORMAT,
        "cached": profile.cached,
        "new": profile.new,
        "seconds": profile.seconds,
        "links": {
            tier.label: {"latency_seconds": link.latency_seconds, "bytes_per_second": link.bytes_per_second}
            for tier, link in profile.links.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    os.replace(file.name, path)


def load_profile(path: Path) -> CostProfile | None:
    """Read the file of `save_profile`; None if it is missing or invalid."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            return None
        return CostProfile(
            tuple(content["cached"]),
            tuple(content["new"]),
            tuple(map(tuple, content["seconds"])),
            {Tier[name.upper()]: Link(**link) for name, link in content["links"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return None


# Measuring


def _clear(target: CalibrationTarget, num_tokens: int) -> None:
    """Zero KV slots: uninitialised memory may hold denormal numbers, which are slow to compute with."""
    for kv_LSGD in (target.device.k_LSGD, target.device.v_LSGD):
        kv_LSGD[:, :num_tokens] = 0.0


def _sample(tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> SampleSpec:
    return SampleSpec(RequestId("calibrate"), SamplingParams(max_tokens=1), 0.0, tokens, len(tokens))


def _links(target: CalibrationTarget, folder: Path | None) -> dict[Tier, Link]:
    """Latency and bandwidth of loads to the device, by tier, from a small and a large node, the best of five each. A
    tier that cannot be measured is absent."""
    block_size = target.device.block_size
    large = min(256, target.num_blocks * block_size // 2 // block_size * block_size)
    sizes = (min(block_size, large), large)
    if sizes[0] == sizes[1]:
        return {}
    _clear(target, 2 * large)
    with _scratch(folder, target.clock) as scratch:
        tiers = TieredStore(
            target.device,
            HostStore(target.device.k_LSGD.device),
            None if scratch is None else DiskStore(scratch, bytes(32)),
            target.clock,
        )
        times = {
            tier: [_load_seconds(target, tiers, tier, num_tokens) for num_tokens in sizes]
            for tier in (Tier.HOST, Tier.DISK)
        }
        tiers.close()
    num_bytes = [num_tokens * target.device.shape.bytes_per_token for num_tokens in sizes]
    return {tier: _link(num_bytes, seconds) for tier, seconds in times.items() if min(seconds) > 0}


@contextmanager
def _scratch(folder: Path | None, clock: Clock) -> Iterator[Path | None]:
    """An empty folder on the same disk, or else in the system's folder for temporary files; None if neither is
    writable or `folder` is None. It is removed afterwards, with those of killed processes."""
    made = None
    for parent in () if folder is None else (_nearest_folder(folder), None):
        with suppress(OSError):
            made = tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=parent, ignore_cleanup_errors=True)
            break
    if made is None:
        yield None
        return
    with made as name:
        for left in Path(name).parent.glob(f"{_SCRATCH}*"):
            with suppress(OSError):
                if left.stat().st_mtime < clock.unix() - _SCRATCH_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
        yield Path(name)


def _link(num_bytes: Sequence[int], seconds: Sequence[float]) -> Link:
    slope = max((seconds[1] - seconds[0]) / (num_bytes[1] - num_bytes[0]), 1e-12)
    return Link(max(seconds[0] - slope * num_bytes[0], 0.0), 1 / slope)


def _load_seconds(target: CalibrationTarget, tiers: TieredStore, tier: Tier, num_tokens: int) -> float:
    size = target.device.block_size
    blocks = [BlockId(block) for block in range(-(-num_tokens // size))]
    loaded = [BlockId(block + len(blocks)) for block in blocks]
    best = 0.0
    for index in range(5):
        key = NodeKey(hashlib.sha256(f"{tier}-{num_tokens}-{index}".encode()).digest())
        if tier is Tier.HOST:
            is_there = tiers.offload(NodeCopy(key, Tier.DEVICE, blocks, 0, num_tokens))
        else:
            is_there = tiers.store(NodeRecord(key, key, 0, num_tokens, None, 0.0, 0.0), Tier.DEVICE, blocks)
        started = target.clock.monotonic()
        if not is_there or not tiers.load(key, tier, loaded, num_tokens):
            return 0.0
        seconds = target.clock.monotonic() - started
        best = seconds if index == 0 else min(best, seconds)
        tiers.drop(key, tier)
    return best


def _nearest_folder(folder: Path) -> Path:
    """The folder, or its closest parent that exists."""
    return next(parent for parent in (folder, *folder.resolve().parents) if parent.is_dir())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _accelerator(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
