"""Worker process of `stillroom bench runtime` with one runtime: reads a JSON request per line, writes a JSON reply.

Runs as a script under the Python that has the runtime installed, so it imports Stillroom only for Stillroom's own
runtimes. It uses each runtime's public interface.

    python runtime_worker.py NAME MODEL_FOLDER bfloat16|float32 NUM_THREADS cpu|cuda
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from stillroom.config.settings import Dtype, Weights
    from stillroom.models.causal_model import CausalModel

MAX_TOKENS = 4096
"""Limit of prompt plus answer."""


class MeasuredRuntime(Protocol):
    """A runtime that decodes greedily and ignores end tokens. Prompts are token ids."""

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Return the seconds for generating `num_tokens` tokens of each prompt, as one batch."""
        ...


class StillroomRuntime:
    """Stillroom's engine as `ask` and `serve` use it, stepped by the caller."""

    weights: "Weights" = "checkpoint"

    def __init__(self, folder: Path, dtype: str, num_threads: int, device: str) -> None:
        import torch

        from stillroom.backends.engine_building import build_engine
        from stillroom.config.settings import RuntimeConfig
        from stillroom.core.clock import SystemClock

        torch.set_num_threads(num_threads)
        decoder = self._load(folder, dtype, device)
        self.engine, _ = build_engine(decoder, RuntimeConfig(max_num_batched_tokens=2048), SystemClock())

    def _load(self, folder: Path, dtype: str, device: str) -> "CausalModel":
        from stillroom.models.loader import load_own_decoder

        return load_own_decoder(folder, device=device, dtype=cast("Dtype", dtype), weights=self.weights)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        from stillroom.core.ids import RequestId
        from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
        from stillroom.core.request import Request, SamplingParams

        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            segments = SegmentedPrompt((Segment(SegmentKind.QUESTION, tuple(prompt)),))
            sampling = SamplingParams(max_tokens=num_tokens)
            self.engine.submit(Request(request_id=RequestId(str(number)), prompt=segments, sampling=sampling))
        num_generated = 0
        while self.engine.has_work:
            num_generated += sum(event.token_id is not None for event in self.engine.step())
        assert num_generated == len(prompts) * num_tokens
        return time.perf_counter() - began


class StillroomInt8(StillroomRuntime):
    """Stillroom's engine with 8-bit weights."""

    weights = "int8"


class StillroomW8A8(StillroomRuntime):
    """Stillroom's engine with 8-bit weights, and 8-bit inputs of several rows."""

    weights = "w8a8"


class StillroomInt4(StillroomRuntime):
    """Stillroom's engine with 4-bit weights."""

    weights = "int4"


class StillroomByTransformers(StillroomRuntime):
    """Stillroom's engine with transformers' model, as architectures run that it has no decoder for."""

    def _load(self, folder: Path, dtype: str, device: str) -> "CausalModel":
        import torch

        from stillroom.models.transformers_decoder import load

        return load(folder, torch.device(device), getattr(torch, dtype), MAX_TOKENS)


class Transformers:
    """Eager `generate` of transformers with SDPA attention."""

    def __init__(self, folder: Path, dtype: str, num_threads: int, device: str) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(num_threads)
        self.torch = torch
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval().to(device)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        began = time.perf_counter()
        with self.torch.inference_mode():
            ids = self.torch.tensor(prompts, device=self.model.device)
            generated = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            generated.tolist()  # waits for the device
        return time.perf_counter() - began


def _require_cpu(name: str, device: str) -> None:
    if device != "cpu":
        raise SystemExit(f"{name} is compared on a CPU only")


class VllmRuntime:
    """vLLM's offline engine in this process, without prefix caching, so that prompts are computed."""

    def __init__(self, folder: Path, dtype: str, num_threads: int, device: str) -> None:
        _require_cpu("vLLM", device)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_threads - 1}")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm

        self.vllm = vllm
        self.engine = vllm.LLM(
            model=str(folder),
            dtype=dtype,
            block_size=32,
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=MAX_TOKENS,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        parameters = self.vllm.SamplingParams(
            temperature=0.0, min_tokens=num_tokens, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        outputs = self.engine.generate(inputs, parameters, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
        return seconds


class LlamaCppRuntime:
    """The C interface of llama.cpp, on a GGUF file of the same weights."""

    def __init__(self, folder: Path, dtype: str, num_threads: int, device: str) -> None:
        _require_cpu("llama.cpp", device)
        import ctypes

        import llama_cpp
        import numpy

        self.numpy, self.api, self.ctypes = numpy, llama_cpp, ctypes
        path = write_gguf(folder, dtype)
        llama_cpp.llama_backend_init()
        self.silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.silent, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = MAX_TOKENS, MAX_TOKENS, 512
        settings.n_threads = settings.n_threads_batch = num_threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        assert self.context, "llama.cpp could not load the GGUF file"
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Return the seconds for all prompts in sequence, because the interface leaves batching to the caller."""
        began = time.perf_counter()
        for prompt in prompts:
            self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
            token = self._next(prompt)
            for _ in range(num_tokens - 1):
                token = self._next([token])
        return time.perf_counter() - began

    def _next(self, tokens: list[int]) -> int:
        array = (self.api.llama_token * len(tokens))(*tokens)
        assert self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(tokens))) == 0
        logits = self.api.llama_get_logits_ith(self.context, -1)
        return int(self.numpy.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


class OpenVinoRuntime:
    """OpenVINO GenAI's pipeline with continuous batching, on a copy of the checkpoint that optimum-intel exports."""

    def __init__(self, folder: Path, dtype: str, num_threads: int, device: str) -> None:
        _require_cpu("OpenVINO", device)
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.openvino, self.genai = numpy, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB of KV
        scheduler.max_num_batched_tokens = MAX_TOKENS
        scheduler.enable_prefix_caching = False
        precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
        settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": num_threads}
        path = str(write_openvino(folder, dtype))
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", settings)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        settings = self.genai.GenerationConfig()
        settings.min_new_tokens = settings.max_new_tokens = num_tokens
        settings.ignore_eos, settings.do_sample = True, False
        inputs = [self.openvino.Tensor(self.numpy.array([prompt], self.numpy.int64)) for prompt in prompts]
        began = time.perf_counter()
        outputs = self.pipeline.generate(inputs, [settings] * len(inputs))
        seconds = time.perf_counter() - began
        assert all(len(output.m_generation_ids[0]) == num_tokens for output in outputs)
        return seconds


def write_openvino(folder: Path, dtype: str) -> Path:
    """Write the checkpoint as OpenVINO's model without a tokenizer into its folder, unless it exists."""
    path = folder / f"openvino-{dtype}"
    if not path.exists():
        from optimum.intel import OVModelForCausalLM

        temporary = path.with_suffix(".tmp")
        model = OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, load_in_8bit=False)
        model.save_pretrained(temporary)
        temporary.rename(path)
    return path


def write_gguf(folder: Path, dtype: str) -> Path:
    """Write the checkpoint's weights as GGUF without a vocabulary into its folder, unless the file exists."""
    path = folder / f"model-{dtype}.gguf"
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        program = Path(__file__).with_name("llama_gguf.py")
        subprocess.run([sys.executable, program, folder, temporary], check=True)
        temporary.rename(path)
    return path


RUNTIMES: dict[str, Callable[[Path, str, int, str], MeasuredRuntime]] = {
    "stillroom": StillroomRuntime,
    "stillroom int8": StillroomInt8,
    "stillroom w8a8": StillroomW8A8,
    "stillroom int4": StillroomInt4,
    "stillroom by transformers": StillroomByTransformers,
    "transformers": Transformers,
    "vllm": VllmRuntime,
    "llama.cpp": LlamaCppRuntime,
    "openvino": OpenVinoRuntime,
}


def peak_rss_bytes() -> int:
    """Return the peak memory of this process; unlike `getrusage`, it excludes the parent's memory at the fork."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(name: str, folder: Path, dtype: str, num_threads: int, device: str) -> None:
    """Load the runtime, report the load time, then answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirects the output of libraries, which would break the JSON lines
    began = time.perf_counter()
    runtime = RUNTIMES[name](folder, dtype, num_threads, device)
    answer: dict[str, Any] = {"load_seconds": time.perf_counter() - began}
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seconds = runtime.generate(request["prompts"], request["num_tokens"])
        print(json.dumps({"seconds": seconds, "peak_rss_bytes": peak_rss_bytes()}), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
