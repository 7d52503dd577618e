"""Worker process of a peer runtime of `stillroom bench anywhere`: answers JSON lines on standard input.

Runs as a script under the Python that has the runtime installed. It imports nothing of Stillroom, and uses the
runtime's public interface.

    python anywhere_worker.py kvboost MODEL_FOLDER bfloat16|float32 NUM_THREADS SETTINGS_JSON
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any


class Numbers:
    """A tokenizer whose texts are token ids written as numbers, without an end token."""

    eos_token_id = None
    pad_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))


class KvBoost:
    """KVBoost: chunk KV reuse on transformers, with its default recompute strategy."""

    def __init__(self, folder: Path, dtype: str, num_threads: int, settings: dict[str, int]) -> None:
        import kvboost
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(num_threads)
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
        self.modes = kvboost.GenerationMode
        self.engine = kvboost.KVBoost(
            model,
            Numbers(),
            max_cache_bytes=settings["cache_bytes"],
            chunk_size=settings["piece_tokens"],
            device="cpu",
        )

    def ask(self, prompt: list[int], num_keepable: int, num_tokens: int, reuses: bool) -> dict[str, Any]:
        """Answer a prompt.

        Args:
            num_keepable: prompt tokens before the question; only these are cached.

        Returns:
            `seconds` to the first token; `call_seconds` of the call, which includes computing the KV to cache;
            `token_ids` of the answer; `num_cached`, the number of tokens whose KV was cached before.
        """
        arrived: list[float] = []
        mode = self.modes.CHUNK_KV_REUSE if reuses else self.modes.BASELINE
        began = time.perf_counter()
        found = self.engine.generate(
            " ".join(map(str, prompt)),
            max_new_tokens=num_tokens,
            mode=mode,
            cacheable_prefix_len=num_keepable,
            on_token=lambda _: arrived.append(time.perf_counter()),
        )
        return {
            "seconds": arrived[0] - began,
            "call_seconds": time.perf_counter() - began,
            "token_ids": [int(number) for number in found.output_text.split()],
            "num_cached": int(found.cached_tokens),
        }


def serve(name: str, folder: Path, dtype: str, num_threads: int, settings: dict[str, int]) -> None:
    """Load the runtime, report the load time, then answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirects the output of libraries, which would break the JSON lines
    began = time.perf_counter()
    runtime = PEERS[name](folder, dtype, num_threads, settings)
    print(json.dumps({"load_seconds": time.perf_counter() - began}), file=answers, flush=True)
    for line in sys.stdin:
        found = runtime.ask(**json.loads(line))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(found | {"peak_rss_bytes": peak}), file=answers, flush=True)


PEERS = {"kvboost": KvBoost}


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), json.loads(sys.argv[5]))
