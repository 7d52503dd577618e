"""`stillroom bench anywhere`: time to first token when chunks are reused in another order (Cache-Craft 5.4).

Stillroom's engine answers prompts of the same chunks in changing orders: with a full prefill, and with chunks placed
from device, host and disk at several recompute ratios. Many shuffled questions over more chunks than fit in a prompt
then show whether the gain lasts. A peer gets the same weights and prompts. How to read it: docs/chunk-reuse.md
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.backends.assembly import kv_shape
from stillroom.config.settings import ReuseConfig
from stillroom.core.kv import OWN_TIERS, Tier
from stillroom.core.prompt import Segment
from stillroom.errors import UsageError
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.models.causal_model import CausalModel
from stillroom.models.loader import load_own_decoder
from stillroom_bench.experiments.anywhere_engine import (
    Answers,
    Ask,
    BenchEngine,
    PromptReply,
    agreement,
    build_fixture,
    cache_in_other_context,
    chunk,
    question,
    shuffled_prompt,
    system,
)
from stillroom_bench.experiments.anywhere_peer import Peer
from stillroom_bench.experiments.experiment_options import AnywhereBenchOptions
from stillroom_bench.instrument.bench_report import BenchResult, share_name
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms
from stillroom_bench.instrument.option_flags import named_pythons
from stillroom_bench.quality.runtime import Shape, write_checkpoint

FULL = "full prefill"


def run_anywhere(
    options: AnywhereBenchOptions,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder that keeps the checkpoint between runs, and KV during a run.
        shape: shape of the model with random weights; None: 135 million parameters.

    Raises:
        UsageError: a peer is unknown, or does not support chunks of this length.
    """
    started = [
        Peer(name, python, work_dir, options.chunk_tokens) for name, python in named_pythons(options.peers).items()
    ]
    shape, environment = shape or Shape(), record_environment()
    folder = write_checkpoint(work_dir, shape, options.dtype, options.seed)
    decoder = load_own_decoder(folder, device="cpu", dtype=options.dtype)
    start_with = [str(folder), options.dtype, str(environment.num_threads)]
    answers, tables, notes, full_of = Answers(), {}, list[str](), dict[str, str]()
    with ExitStack() as stack:
        fixtures = stack.enter_context(_fixtures(decoder, options, work_dir))
        arms = [Arm(FULL, _run(fixtures[FULL], options, answers, FULL, None))]
        for tier in OWN_TIERS:
            for ratio in options.ratios:
                name = f"from {tier.label}, {share_name(ratio)} computed again"
                reuse_options = AnywhereOptions(ratio, "question")
                arms.append(Arm(name, _run(fixtures[tier.label], options, answers, name, reuse_options, tier)))
                full_of[name] = FULL
        for peer in started:
            on_progress(f"loading {peer.name}")
            try:
                peer.start(start_with, _bytes_of_all_prompts(decoder, options))
            except UsageError as error:
                notes.append(f"{peer.name}: left out, {error}")
                continue
            stack.callback(peer.close)
            cache_in_other_context(options, peer.ask)
            full_name = f"{peer.name}, {FULL}"
            arms += [Arm(full_name, _run_peer(peer.ask_in_full, options, answers, full_name))]
            arms += [Arm(peer.name, _run_peer(peer.ask, options, answers, peer.name))]
            full_of[peer.name] = full_name
        samples = run_arms(
            arms, repeat=options.repeat, on_run=lambda arm, at: on_progress(f"{arm}, run {at}"), only_own=True
        )
    tables["Answers beside a full prefill"] = answers.rows(full_of)
    if options.num_lasting:
        on_progress(f"{options.num_lasting} shuffled questions over {options.num_documents} chunks")
        tables["Shuffled questions, by hundreds"] = _lasting(decoder, options, work_dir)
        for peer in (peer for peer in started if peer.name in full_of):
            on_progress(f"{options.num_lasting} shuffled questions to {peer.name}")
            try:
                peer.start(start_with, 2 * _lasting_bytes(decoder, options))
                rows = _shuffled(options, peer.ask, peer.ask_in_full, kept="tokens it had kept")
                tables[f"Shuffled questions to {peer.name}"] = rows
            except UsageError as error:
                notes.append(f"{peer.name}: shuffled questions left out, {error}")
            finally:
                peer.close()
    parameters = {
        "num_chunks": options.num_chunks,
        "chunk_tokens": options.chunk_tokens,
        "question_tokens": options.question_tokens,
        "num_lasting": options.num_lasting,
        "num_documents": options.num_documents,
        "repeat": options.repeat,
        "seed": options.seed,
        "dtype": options.dtype,
        "num_parameters": shape.layer_parameters + shape.vocab_size * shape.hidden_size,
    }
    return BenchResult("stillroom bench anywhere", environment, parameters, samples, FULL, notes=notes, tables=tables)


@contextmanager
def _fixtures(decoder: CausalModel, options: AnywhereBenchOptions, work_dir: Path) -> Iterator[dict[str, BenchEngine]]:
    """Yield an engine per tier whose chunks are cached there, and an engine without reuse."""
    room = 4 * (options.prompt_tokens + 16 * (options.num_chunks + 2))
    with tempfile.TemporaryDirectory(dir=work_dir) as scratch:
        anywhere = ReuseConfig(mode="anywhere", audit_share=0.0, load="always")
        fixtures = {
            FULL: build_fixture(decoder, options, ReuseConfig(mode="off"), None, room),
            Tier.DEVICE.label: build_fixture(decoder, options, anywhere, None, room),
            Tier.HOST.label: build_fixture(decoder, options, anywhere, None, room),
            Tier.DISK.label: build_fixture(decoder, options, replace(anywhere, host_bytes=0), Path(scratch), room),
        }
        for fixture in fixtures.values():
            fixture.allow(None)
            cache_in_other_context(options, fixture.ask)
        yield fixtures
        for fixture in fixtures.values():
            fixture.cache.close()


def _run(
    fixture: BenchEngine,
    options: AnywhereBenchOptions,
    answers: Answers,
    name: str,
    reuse_options: AnywhereOptions | None,
    tier: Tier | None = None,
) -> Callable[[int], Metrics]:
    def run(repetition: int) -> Metrics:
        fixture.allow(reuse_options)
        if tier not in (None, Tier.DEVICE):
            fixture.evict_from_device()
        reply = fixture.ask(shuffled_prompt(options, repetition))
        assert reply.sources == {tier}, f"chunks came from {reply.sources}, not from {tier}"
        answers.add(name, repetition, reply)
        return {"ttft_seconds": reply.seconds, "recomputed_tokens": reply.num_recomputed}

    return run


def _run_peer(ask: Ask, options: AnywhereBenchOptions, answers: Answers, name: str) -> Callable[[int], Metrics]:
    def run(repetition: int) -> Metrics:
        reply = ask(shuffled_prompt(options, repetition))
        answers.add(name, repetition, reply)
        return {"ttft_seconds": reply.seconds, "kept_tokens": reply.num_cached}

    return run


def _bytes_of_all_prompts(decoder: CausalModel, options: AnywhereBenchOptions) -> int:
    """Return the KV bytes of a peer's prompts before the shuffled questions; it caches a chunk once per prefix."""
    num_prompts = options.num_chunks + 1 + options.repeat
    return num_prompts * options.prompt_tokens * kv_shape(decoder).bytes_per_token


def _lasting_bytes(decoder: CausalModel, options: AnywhereBenchOptions) -> int:
    """Return the KV bytes of all documents, each counted once."""
    return options.num_documents * options.chunk_tokens * kv_shape(decoder).bytes_per_token


def _lasting(decoder: CausalModel, options: AnywhereBenchOptions, work_dir: Path) -> list[dict[str, Any]]:
    """Measure questions over randomly drawn chunks; device, host and disk together hold each chunk about twice."""
    total = _lasting_bytes(decoder, options)
    with tempfile.TemporaryDirectory(dir=work_dir) as scratch:
        reuse = ReuseConfig(mode="anywhere", audit_share=0.0, host_bytes=total, disk_bytes=total)
        fixture = build_fixture(decoder, options, reuse, Path(scratch), 4 * options.prompt_tokens + 600)
        off = build_fixture(decoder, options, ReuseConfig(mode="off"), None, 2 * options.prompt_tokens)

        def ask_and_do_idle_work(segments: Sequence[Segment]) -> PromptReply:
            reply = fixture.ask(segments)
            while fixture.engine.do_idle_work():  # as an idle server does between requests
                pass
            return reply

        rows = _shuffled(options, ask_and_do_idle_work, off.ask)
        fixture.cache.close()
    return rows


def _shuffled(
    options: AnywhereBenchOptions, ask: Ask, ask_in_full: Ask, kept: str = "tokens not computed"
) -> list[dict[str, Any]]:
    """Return a row per hundred questions; every tenth question also runs with a full prefill."""
    rng = np.random.default_rng(options.seed)
    rows: list[dict[str, Any]] = []
    found: list[PromptReply] = []
    pairs: list[tuple[PromptReply, PromptReply]] = []
    for number in range(options.num_lasting):
        chosen = rng.choice(options.num_documents, options.num_chunks, replace=False).tolist()
        prompt = [system(options), *(chunk(options, one) for one in chosen), question(options, number)]
        found.append(ask(prompt))
        if number % 10 == 0:
            pairs.append((ask_in_full(prompt), found[-1]))
        if (number + 1) % 100 == 0 or number + 1 == options.num_lasting:
            seconds = float(np.median([reply.seconds for reply in found]))
            full = float(np.median([reply.seconds for reply, _ in pairs]))
            num_cached = sum(reply.num_cached for reply in found)
            rows.append(
                {
                    "questions": f"to {number + 1}",
                    "full prefill, median s": f"{full:.3f}",
                    "median s": f"{seconds:.3f}",
                    "times faster": f"{full / seconds:.2f}",
                    kept: f"{num_cached / (len(found) * options.prompt_tokens):.1%}",
                }
                | agreement(pairs)
            )
            found, pairs = [], []
    return rows
