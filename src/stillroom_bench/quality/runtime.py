"""`stillroom bench runtime`: the decoder against transformers, llama.cpp, vLLM and OpenVINO, on random weights.

Each runtime is a separate process (`runtime_worker.py`). Runtimes take turns with the same prompts, which are new
random tokens each time, so that no prefix cache helps. Speed does not depend on the weights' values, which are random.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.errors import UsageError
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import device_name, record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, Samples, run_arms
from stillroom_bench.instrument.option_flags import named_pythons
from stillroom_bench.instrument.worker import WorkerProcess
from stillroom_bench.quality.quality_options import RuntimeOptions
from stillroom_bench.quality.runtime_worker import MAX_TOKENS

OURS = "stillroom"
OTHERS_OF_OURS = ("stillroom int8", "stillroom w8a8", "stillroom int4", "stillroom by transformers")
PEERS = (*OTHERS_OF_OURS, "transformers", "llama.cpp", "vllm", "openvino")
DTYPES = ("bfloat16", "float32")

_WORKER = Path(__file__).parent / "runtime_worker.py"
_DECODE_CONTEXT = 512
_NUM_DECODED = 32
_BATCH = 8
_BATCH_PROMPT = 64
_LIMIT_SIZE = 2048
_READ_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama of random weights; the default has 135 million parameters."""

    vocab_size: int = 49_152
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_layers: int = 30
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of the layers' matrices, which every token is multiplied by."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def prefill_flops(self, num_tokens: int) -> float:
        """Return the floating-point operations of a prompt; causal attention counts half of its square."""
        attention = 2 * self.num_layers * self.num_heads * self.head_dim * num_tokens**2
        return 2.0 * self.layer_parameters * num_tokens + attention + 2.0 * self.vocab_size * self.hidden_size

    def decode_bytes(self, context: int, itemsize: int) -> float:
        """Return the bytes that one decoded token reads: all matrices once, and the context's keys and values."""
        kv = 2 * self.num_layers * self.num_kv_heads * self.head_dim * context
        return float(itemsize * (self.layer_parameters + self.vocab_size * self.hidden_size + kv))


SHAPES = {
    "135m": Shape(),
    "1.5b": Shape(151_936, 1536, 8960, 28, 12, 2, 128),
}
"""Shapes by their number of parameters; the second is that of Qwen2.5-1.5B."""


def write_checkpoint(folder: Path, shape: Shape, dtype: str, seed: int) -> Path:
    """Write a checkpoint of random weights to its own folder, unless it exists."""
    import torch
    from safetensors.torch import save_file

    path = folder / f"llama-{dtype}-{'x'.join(str(value) for value in vars_of(shape).values())}-seed{seed}"
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, height: int, width: int) -> None:
        values = torch.randn((height, width), generator=generator) * 0.02
        tensors[f"{name}.weight"] = values.to(getattr(torch, dtype))

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = torch.ones(shape.hidden_size, dtype=getattr(torch, dtype))

    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrix("model.embed_tokens", shape.vocab_size, shape.hidden_size)
    for number in range(shape.num_layers):
        layer = f"model.layers.{number}"
        norm(f"{layer}.input_layernorm")
        norm(f"{layer}.post_attention_layernorm")
        for name, height in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            matrix(f"{layer}.self_attn.{name}_proj", height, shape.hidden_size)
        matrix(f"{layer}.self_attn.o_proj", shape.hidden_size, q_size)
        matrix(f"{layer}.mlp.gate_proj", shape.intermediate_size, shape.hidden_size)
        matrix(f"{layer}.mlp.up_proj", shape.intermediate_size, shape.hidden_size)
        matrix(f"{layer}.mlp.down_proj", shape.hidden_size, shape.intermediate_size)
    norm("model.norm")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


def vars_of(shape: Shape) -> dict[str, int]:
    """Return the fields by name."""
    return {name: getattr(shape, name) for name in Shape.__dataclass_fields__}


class Worker(WorkerProcess):
    """A process of `runtime_worker.py`."""

    def __init__(self, name: str, python: str, folder: Path, dtype: str, num_threads: int, device: str) -> None:
        command = [python, str(_WORKER), name, str(folder), dtype, str(num_threads), device]
        super().__init__(name, command, folder / f"{name}.log")

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Return the seconds for generating `num_tokens` tokens per prompt.

        Raises:
            UsageError: the process died.
        """
        return float(self.ask({"prompts": prompts, "num_tokens": num_tokens})["seconds"])


@dataclass(slots=True)
class _RuntimeRun:
    shape: Shape
    device: str
    repeat: int
    seed: int
    say: Callable[[str], None]
    samples: Samples = field(default_factory=Samples)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def run_runtime(
    options: RuntimeOptions,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder that keeps checkpoints between runs.

    Raises:
        UsageError: a peer or dtype is unknown, or a length exceeds the model's limit.
    """
    dtypes, lengths, repeat, seed = options.dtypes, options.lengths, options.repeat, options.seed
    peers = dict.fromkeys((*OTHERS_OF_OURS, "transformers"), sys.executable) | named_pythons(options.peers)
    if unknown := set(peers) - set(PEERS):
        raise UsageError(f"unknown peers {', '.join(sorted(unknown))}; known are {', '.join(PEERS)}")
    if unknown := set(dtypes) - set(DTYPES):
        raise UsageError(f"unknown dtypes {', '.join(sorted(unknown))}; known are {', '.join(DTYPES)}")
    if max(lengths) >= MAX_TOKENS:
        raise UsageError(f"--length {max(lengths)} is too long; prompt and answer are limited to {MAX_TOKENS} tokens")
    run = _RuntimeRun(shape or SHAPES[options.size], options.device, repeat, seed, on_progress)
    environment = record_environment()
    for dtype in dtypes:
        folder = write_checkpoint(work_dir, run.shape, dtype, seed)
        with _started(run, {OURS: sys.executable, **peers}, folder, dtype, environment.num_threads) as workers:
            arms = list(_arms(run, workers, dtype, lengths))
            found = run_arms(arms, repeat=repeat, on_run=lambda arm, at: run.say(f"{arm}, run {at}"), only_own=True)
            run.samples.values |= found.values
            run.tables[f"memory, {dtype}"] = [
                {"runtime": worker.name, "peak RSS MiB": worker.peak_rss_bytes / 2**20} for worker in workers
            ]
        run.tables[f"against the machine's limits, {dtype}"] = _limits(run, dtype, lengths, environment.num_threads)
    parameters = {
        **vars_of(run.shape),
        "device": device_name(run.device),
        "repeat": repeat,
        "seed": seed,
        "lengths": list(lengths),
        "decode_context": _DECODE_CONTEXT,
        "batch": f"{_BATCH} prompts of {_BATCH_PROMPT} tokens, {_NUM_DECODED} tokens each",
    }
    return BenchResult(
        "stillroom bench runtime", environment, parameters, run.samples, OURS, notes=run.notes, tables=run.tables
    )


@contextlib.contextmanager
def _started(
    run: _RuntimeRun, pythons: Mapping[str, str], folder: Path, dtype: str, num_threads: int
) -> Iterator[list[Worker]]:
    """Yield all runtimes that start; add a note for each that does not."""
    workers: list[Worker] = []
    try:
        for name, python in pythons.items():
            run.say(f"loading {name}, {dtype}")
            worker = Worker(name, python, folder, dtype, num_threads, run.device)
            try:
                seconds = worker.wait()
            except UsageError as error:
                worker.close()
                if name == OURS:
                    raise
                run.notes.append(f"{name}, {dtype}: left out, {error}")
                continue
            run.say(f"{name} loaded in {seconds:.1f} s")
            workers.append(worker)
        yield workers
    finally:
        for worker in workers:
            worker.close()


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Random prompts, the same for all runtimes and different in every repetition."""

    seed: int
    vocab_size: int

    def draw(self, repetition: int, kind: int, count: int, length: int) -> list[list[int]]:
        """Return `count` prompts of `length` tokens; `kind` distinguishes the prompts of one repetition."""
        rng = np.random.default_rng([self.seed, repetition + 100, kind])  # warm-up repetitions are negative
        drawn: list[list[int]] = rng.integers(1, self.vocab_size, size=(count, length)).tolist()
        return drawn

    def prefill(self, worker: Worker, length: int) -> Callable[[int], Metrics]:
        return lambda at: {"first_token_seconds": worker.generate(self.draw(at, length, 1, length), 1)}

    def decode(self, worker: Worker) -> Callable[[int], Metrics]:
        def measure(at: int) -> Metrics:
            first = worker.generate(self.draw(at, 1, 1, _DECODE_CONTEXT), 1)
            everything = worker.generate(self.draw(at, 2, 1, _DECODE_CONTEXT), 1 + _NUM_DECODED)
            return {"token_seconds": (everything - first) / _NUM_DECODED}

        return measure

    def batch(self, worker: Worker) -> Callable[[int], Metrics]:
        def measure(at: int) -> Metrics:
            seconds = worker.generate(self.draw(at, 3, _BATCH, _BATCH_PROMPT), _NUM_DECODED)
            return {"tokens_per_second": _BATCH * _NUM_DECODED / seconds}

        return measure


def _arms(run: _RuntimeRun, workers: Sequence[Worker], dtype: str, lengths: Sequence[int]) -> Iterator[Arm]:
    prompts = _Prompts(run.seed, run.shape.vocab_size)
    for length in lengths:
        for worker in workers:
            yield Arm(f"{dtype}: prefill of {length} tokens/{worker.name}", prompts.prefill(worker, length))
    for worker in workers:
        yield Arm(f"{dtype}: decode after {_DECODE_CONTEXT} tokens/{worker.name}", prompts.decode(worker))
    for worker in workers:
        if worker.name != "llama.cpp":  # its interface leaves batching to the caller
            yield Arm(f"{dtype}: batch of {_BATCH}/{worker.name}", prompts.batch(worker))


# Limits


def _limits(run: _RuntimeRun, dtype: str, lengths: Sequence[int], num_threads: int) -> list[dict[str, Any]]:
    """Compare the achieved rates with those of a matrix product and a memory read, measured now on this machine."""
    import torch

    run.say("measuring the machine's limits")
    torch.set_num_threads(num_threads)
    size = _LIMIT_SIZE if run.device == "cpu" else 4 * _LIMIT_SIZE
    flops = {name: _matmul_flops(getattr(torch, name), size, run.device) for name in DTYPES}
    bandwidth = _read_bandwidth(run.device)
    rows: list[dict[str, Any]] = []
    for name, value in flops.items():
        rows.append({"what": f"limit: {size}^3 product in {name}", "GFLOP/s": value / 1e9, "GB/s": ""})
    rows.append({"what": "limit: reading memory", "GFLOP/s": "", "GB/s": bandwidth / 1e9})
    for length in lengths:
        seconds = float(np.median(run.samples.of(f"{dtype}: prefill of {length} tokens/{OURS}", "first_token_seconds")))
        achieved = run.shape.prefill_flops(length) / seconds
        rows.append({"what": f"{OURS}: prefill of {length} tokens", "GFLOP/s": achieved / 1e9, "GB/s": ""})
    seconds = float(
        np.median(run.samples.of(f"{dtype}: decode after {_DECODE_CONTEXT} tokens/{OURS}", "token_seconds"))
    )
    read = run.shape.decode_bytes(_DECODE_CONTEXT, getattr(torch, dtype).itemsize) / seconds
    rows.append({"what": f"{OURS}: decode", "GFLOP/s": "", "GB/s": read / 1e9})
    return rows


def _matmul_flops(dtype: Any, size: int, device: str) -> float:
    import torch

    matrix = torch.randn((size, size), device=device).to(dtype)
    return float(2 * size**3 / _fastest(lambda: matrix @ matrix, device))


def _read_bandwidth(device: str) -> float:
    import torch

    num_bytes = _READ_BYTES if device == "cpu" else 8 * _READ_BYTES
    content = torch.ones(num_bytes // 4, device=device)
    return float(num_bytes / _fastest(content.sum, device))


def _fastest(work: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest of six runs, after one run as warm-up."""
    import torch

    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
