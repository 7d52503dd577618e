"""Worker process of `stillroom bench reuse` with one arm: answers each JSON line on standard input with one.

Runs as a script under the Python that has the runtime installed, so it imports Stillroom only for Stillroom's own arms.
`stillroom.planner.simulation.driving`, which sends and times requests, is loaded by its path.

    python reuse_worker.py NAME MODEL_FOLDER NUM_THREADS SETTINGS_JSON
"""

import importlib.util
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stillroom.planner.simulation.driving import DrivenRuntime, Stepped


DRIVING = Path(__file__).parents[2] / "stillroom" / "planner" / "simulation" / "driving.py"
"""The two packages are installed side by side."""
RUNTIMES = Path(__file__).parents[1] / "quality" / "runtime_worker.py"
SEARCH = Path(__file__).with_name("reuse_search.py")


class VllmReuse:
    """vLLM's offline engine in this process with automatic prefix caching, stepped by the caller."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any], num_threads: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # overridden below
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_threads - 1}")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm

        block_size = 32  # the smallest supported on a CPU
        room = settings["plenty" if name == "vllm plenty" else "device"]
        model = vllm.LLM(
            model=str(folder),
            dtype="bfloat16",
            block_size=block_size,
            max_model_len=settings["longest"],
            max_num_seqs=settings["max_seqs"],
            max_num_batched_tokens=settings["step_tokens"],
            num_gpu_blocks_override=1 + room // block_size,  # vLLM never uses one block
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
        )
        self.version = f"vLLM {vllm.__version__}"
        self.engine: Any = model.llm_engine
        num_tokens = settings["max_tokens"]
        self.parameters = vllm.SamplingParams(
            temperature=0.0, min_tokens=num_tokens, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        self.begun: set[str] = set()

    def reset(self) -> None:
        assert self.engine.reset_prefix_cache()
        self.begun.clear()

    @property
    def has_work(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def submit(self, number: int, prompt: Sequence[Sequence[int]]) -> None:
        self.begun.discard(str(number))
        self.engine.add_request(str(number), {"prompt_token_ids": joined(prompt)}, self.parameters)

    def step(self) -> "Stepped":
        outputs = self.engine.step()
        new = [
            output
            for output in outputs
            if output.request_id not in self.begun and output.outputs and output.outputs[0].token_ids
        ]
        self.begun.update(output.request_id for output in new)
        firsts = [(int(output.request_id), [output.num_cached_tokens or 0, 0, 0]) for output in new]
        return firsts, [int(output.request_id) for output in outputs if output.finished]

    def do_idle_work(self) -> bool:
        return False


class LlamaCppReuse:
    """The C interface of llama.cpp as its server uses it with `cache_prompt` and one slot.

    Requests run in sequence; a prompt reuses the context of the previous one up to their first difference.
    """

    def __init__(self, name: str, folder: Path, settings: dict[str, Any], num_threads: int) -> None:
        runtimes = script(RUNTIMES)
        self.inner: Any = runtimes.LlamaCppRuntime(folder, "bfloat16", num_threads)
        self.version = f"llama-cpp-python {self.inner.api.__version__}"
        self.num_tokens: int = settings["max_tokens"]
        self.queue: deque[tuple[int, list[int]]] = deque()
        self.kept: list[int] = []
        self.current, self.next_token, self.num_left = 0, 0, 0
        self.reset()

    def reset(self) -> None:
        self.kept = []
        self._cut(0)

    def _cut(self, length: int) -> None:
        api = self.inner.api
        assert api.llama_memory_seq_rm(api.llama_get_memory(self.inner.context), -1, length, -1)

    @property
    def has_work(self) -> bool:
        return self.num_left > 0 or bool(self.queue)

    def submit(self, number: int, prompt: Sequence[Sequence[int]]) -> None:
        self.queue.append((number, joined(prompt)))

    def step(self) -> "Stepped":
        if self.num_left:
            self.kept.append(self.next_token)
            self.next_token = self.inner._next([self.next_token])
            self.num_left -= 1
            return [], self._ended()
        number, tokens = self.queue.popleft()
        num_cached = min(common_prefix(tokens, self.kept), len(tokens) - 1)
        self._cut(num_cached)
        self.next_token = self.inner._next(tokens[num_cached:])
        self.current, self.kept, self.num_left = number, tokens, self.num_tokens - 1
        return [(number, [num_cached, 0, 0])], self._ended()

    def _ended(self) -> list[int]:
        return [] if self.num_left else [self.current]

    def do_idle_work(self) -> bool:
        return False


def joined(prompt: Sequence[Sequence[int]]) -> list[int]:
    """Concatenate the parts of a prompt."""
    return [token for part in prompt for token in part]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    limit = min(len(first), len(second))
    return next((at for at in range(limit) if first[at] != second[at]), limit)


def script(path: Path) -> Any:
    """Load a file that imports nothing of Stillroom as a module.

    Its folder is not on the module path, because `statistics` of the bench would shadow the standard library's.
    """
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ours(name: str, folder: Path, settings: dict[str, Any], num_threads: int) -> "DrivenRuntime":
    from stillroom_bench.experiments.reuse_engine import OurRuntime

    return OurRuntime(name, folder, settings, num_threads)


PEERS: dict[str, Callable[[str, Path, dict[str, Any], int], "DrivenRuntime"]] = {
    "vllm": VllmReuse,
    "vllm plenty": VllmReuse,
    "llama.cpp": LlamaCppReuse,
}


def serve(name: str, folder: Path, num_threads: int, settings: dict[str, Any]) -> None:
    """Load the runtime, report the load time, then answer requests until the input ends."""
    drive = script(DRIVING).drive
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirects the output of libraries, which would break the JSON lines
    peak_rss_bytes = script(RUNTIMES).peak_rss_bytes
    began, cores = time.perf_counter(), os.sched_getaffinity(0)
    runtime = PEERS.get(name, _ours)(name, folder, settings, num_threads)
    version = getattr(runtime, "version", "")
    if settings["index"]:
        searches = script(SEARCH)
        search = searches.FaissSearch(settings["index"], settings["nprobe"], cores)
        runtime = searches.Searched(runtime, search)
    loaded = {"load_seconds": time.perf_counter() - began, "version": version}
    print(json.dumps(loaded), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if question["is_first"]:
            runtime.reset()
        found = drive(runtime, question["prompts"], question["dues"])
        print(json.dumps(found | {"peak_rss_bytes": peak_rss_bytes()}), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
