"""Time to the first token of long prompts under vLLM: computed, and loaded from the KV tier by the connector.

    python -m tests.backends.vllm.measure VLLM_PYTHON MODEL_FOLDER [NUM_TOKENS] [NUM_PROMPTS]

Each prompt is run once to be saved. Then it is computed (with a salt of its own) and loaded, in alternating order, with
vLLM's own cache emptied before each. Random tokens, bfloat16, one request at a time.
"""

import random
import sys
import tempfile
from pathlib import Path

from stillroom_bench.instrument.statistics import ratio_of_means, summarise
from tests.backends.vllm.vllm_process import started


def main(python: str, folder: Path, num_tokens: int, num_prompts: int) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 900) for _ in range(num_tokens)] for _ in range(num_prompts)]
    seconds: dict[str, list[float]] = {"computed": [], "loaded": []}
    cached: dict[str, list[int]] = {"computed": [], "loaded": []}
    with tempfile.TemporaryDirectory() as tier:
        extra = {"kv_tier": f"file://{tier}", "save_at_use": 1, "piece_tokens": 128}
        with started(python, folder, "bfloat16", extra) as vllm:
            first = vllm.ask(prompts, num_tokens=1)["tokens"]
            for number, prompt in enumerate(prompts):
                for kind in ("computed", "loaded") if number % 2 else ("loaded", "computed"):
                    found = vllm.ask([prompt], num_tokens=1, salt=f"fresh {number}" if kind == "computed" else "")
                    seconds[kind] += found["seconds"]
                    cached[kind] += found["cached"]
                    assert found["tokens"] == [first[number]], f"another token of prompt {number}, {kind}"
        num_bytes = sum(path.stat().st_size for path in Path(tier).rglob("*.kv"))
    for kind, values in seconds.items():
        summary = summarise(values)
        interval = f"[{1000 * summary.ci_low:.0f}, {1000 * summary.ci_high:.0f}]"
        print(f"{kind}: mean {1000 * summary.mean:.0f} ms {interval}, {sum(cached[kind])} tokens loaded")
    print(f"loaded / computed: {ratio_of_means(seconds['loaded'], seconds['computed'], block=1)}")
    print(
        f"{num_prompts} prompts of {num_tokens} tokens, the same first tokens; {num_bytes / 2**20:.0f} MiB of records"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, [*sys.argv[3:], *("1000", "10")[len(sys.argv) - 3 :]]))
