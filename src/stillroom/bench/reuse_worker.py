"""One arm of `stillroom bench reuse` in a process of its own: answers JSON lines on standard input, a line each.

Runs as a script under the Python that has the runtime installed, so it imports nothing of Stillroom before it is asked
to. Requests come when they are due, whether or not the ones before have been answered (open loop), and each is timed
from that moment to its first token.

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
from typing import Any, Protocol

FirstToken = tuple[int, list[int]]
"""Number of the request, and how many tokens of its prompt were kept on device, host and disk."""
Stepped = tuple[list[FirstToken], list[int]]
"""Whose first tokens came in a step, and the numbers of those whose answers are complete."""


class Runtime(Protocol):
    """Prompts are lists of parts, which are lists of token ids; answers are greedy."""

    def reset(self) -> None:
        """Forget everything that was kept."""
        ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, number: int, prompt: Sequence[Sequence[int]]) -> None: ...

    def step(self) -> Stepped:
        """Go on for a moment."""
        ...

    def tend(self) -> bool:
        """Something useful in an idle moment; False if there is nothing."""
        ...


def drive(
    runtime: Runtime,
    prompts: Sequence[Sequence[Sequence[int]]],
    dues: Sequence[float] | None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Send every prompt when it is due and wait until all are answered.

    Args:
        dues: seconds from now, ascending; None sends each when the one before is answered.

    Returns:
        `seconds` from due to first token, `response_seconds` to the last one, and `cached` tokens by tier, of each
        request; `wall_seconds` until all were answered.
    """
    sent: list[float] = []
    seconds, cached = [0.0] * len(prompts), [[0, 0, 0] for _ in prompts]
    response_seconds = [0.0] * len(prompts)
    began = clock()
    while len(sent) < len(prompts) or runtime.has_work:
        now = clock() - began
        while len(sent) < len(prompts) and (dues[len(sent)] <= now if dues else not runtime.has_work):
            runtime.submit(len(sent), prompts[len(sent)])
            sent.append(dues[len(sent)] if dues else now)
        if runtime.has_work:
            firsts, ended = runtime.step()
            now = clock() - began
            for number, kept in firsts:
                seconds[number], cached[number] = now - sent[number], kept
            for number in ended:
                response_seconds[number] = now - sent[number]
        elif dues and not runtime.tend():
            sleep(max(0.0, dues[len(sent)] - (clock() - began)))
    wall_seconds = clock() - began
    while runtime.tend():  # nobody waits; what comes next does not pay for it
        pass
    return {
        "seconds": seconds,
        "response_seconds": response_seconds,
        "cached": cached,
        "wall_seconds": wall_seconds,
    }


class Vllm:
    """The offline engine in this process with automatic prefix caching, stepped by hand."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any], num_threads: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # overridden below
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_threads - 1}")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm

        block_size = 32  # the smallest it takes on a CPU
        room = settings["plenty" if name == "vllm plenty" else "device"]
        model = vllm.LLM(
            model=str(folder),
            dtype="bfloat16",
            block_size=block_size,
            max_model_len=settings["longest"],
            max_num_seqs=settings["max_seqs"],
            max_num_batched_tokens=settings["step_tokens"],
            num_gpu_blocks_override=1 + room // block_size,  # one of them it never uses
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
        )
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

    def step(self) -> Stepped:
        outputs = self.engine.step()
        new = [
            output
            for output in outputs
            if output.request_id not in self.begun and output.outputs and output.outputs[0].token_ids
        ]
        self.begun.update(output.request_id for output in new)
        firsts = [(int(output.request_id), [output.num_cached_tokens or 0, 0, 0]) for output in new]
        return firsts, [int(output.request_id) for output in outputs if output.finished]

    def tend(self) -> bool:
        return False


class LlamaCpp:
    """The C interface as its server uses it with `cache_prompt` and one slot: one request after the other, and the
    context goes on from where the next prompt and the last one part."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any], num_threads: int) -> None:
        runtimes = sibling("runtime_worker")
        self.inner: Any = runtimes.LlamaCpp(folder, "bfloat16", num_threads)
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

    def step(self) -> Stepped:
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

    def tend(self) -> bool:
        return False


def joined(prompt: Sequence[Sequence[int]]) -> list[int]:
    """As one text: other runtimes know no parts."""
    return [token for part in prompt for token in part]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    limit = min(len(one), len(other))
    return next((at for at in range(limit) if one[at] != other[at]), limit)


def sibling(name: str) -> Any:
    """Another script of this folder, which is not on the path: our `statistics` is not the library's."""
    spec = importlib.util.spec_from_file_location(f"sibling_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ours(name: str, folder: Path, settings: dict[str, Any], num_threads: int) -> Runtime:
    from stillroom.bench.reuse_engine import OurRuntime

    return OurRuntime(name, folder, settings, num_threads)


PEERS: dict[str, Callable[[str, Path, dict[str, Any], int], Runtime]] = {
    "vllm": Vllm,
    "vllm plenty": Vllm,
    "llama.cpp": LlamaCpp,
}


def serve(name: str, folder: Path, num_threads: int, settings: dict[str, Any]) -> None:
    """Load, say so, then answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    peak_rss_bytes = sibling("runtime_worker").peak_rss_bytes
    began, cores = time.perf_counter(), os.sched_getaffinity(0)
    runtime = PEERS.get(name, _ours)(name, folder, settings, num_threads)
    if settings["index"]:
        runtime = sibling("reuse_search").Searched(runtime, settings["index"], settings["nprobe"], cores)
    print(json.dumps({"load_seconds": time.perf_counter() - began}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if question["is_first"]:
            runtime.reset()
        found = drive(runtime, question["prompts"], question["dues"])
        print(json.dumps(found | {"peak_rss_bytes": peak_rss_bytes()}), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
