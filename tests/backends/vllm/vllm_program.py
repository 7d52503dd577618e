"""vLLM in a process of its own: answers each JSON line on standard input, a round of prompts, with one.

    PYTHONPATH=src VLLM/bin/python tests/backends/vllm/vllm_program.py MODEL_FOLDER DTYPE CONNECTOR_JSON

The last argument is `kv_connector_extra_config`, or `null` for vLLM alone. A round has `prompts` (token ids), `salt`,
`num_tokens` and `resets`: whether vLLM's own prefix cache is emptied first. Prompts run one after the other.
"""

import json
import os
import sys
import time
from typing import Any


def load(folder: str, dtype: str, extra: dict[str, Any] | None) -> Any:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None
    if extra is not None:
        transfer = KVTransferConfig(
            kv_connector="StillroomConnector",
            kv_connector_module_path="stillroom.backends.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )
    return LLM(
        model=folder,
        dtype=dtype,
        block_size=32,
        max_model_len=2048,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
    )


def answer(llm: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Return the greedy tokens of each prompt, how many tokens of it were cached, and the seconds it took."""
    from vllm import SamplingParams

    for _ in range(1000 if question["resets"] else 0):
        if llm.reset_prefix_cache():  # not while blocks of the request before are held to be saved
            break
        time.sleep(0.005)
    count = question["num_tokens"]
    greedy = SamplingParams(temperature=0.0, min_tokens=count, max_tokens=count, ignore_eos=True, detokenize=False)
    found: dict[str, Any] = {"tokens": [], "cached": [], "seconds": []}
    for tokens in question["prompts"]:
        prompt = {"prompt_token_ids": tokens} | ({"cache_salt": question["salt"]} if question["salt"] else {})
        began = time.perf_counter()
        (output,) = llm.generate([prompt], greedy, use_tqdm=False)
        found["seconds"].append(time.perf_counter() - began)
        found["tokens"].append(list(output.outputs[0].token_ids))
        found["cached"].append(output.num_cached_tokens or 0)
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own output would break the JSON lines
    llm = load(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    for line in sys.stdin:
        print(json.dumps(answer(llm, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
