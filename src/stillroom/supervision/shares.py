"""The share of memory, processors and GPUs that each of several engines on one machine gets. Pure.

Settings are those of the whole machine, as for one process, and every budget is divided.
"""

from dataclasses import replace

from stillroom.config.settings import StillroomConfig


def share_of(config: StillroomConfig, num_engines: int, *, num_cores: int, num_gpus: int) -> StillroomConfig:
    """Return the settings of each of several engines.

    Args:
        num_cores: that this process may use.
        num_gpus: that the engines use; 0: they compute on the processor.
    """
    sharing_a_device = -(-num_engines // num_gpus) if num_gpus else num_engines
    threads = config.runtime.num_threads or num_cores
    runtime = replace(
        config.runtime,
        kv_bytes=max(1, config.runtime.kv_bytes // sharing_a_device),
        num_threads=max(1, threads // num_engines),
    )
    reuse = replace(
        config.reuse,
        host_bytes=config.reuse.host_bytes // num_engines,
        disk_bytes=config.reuse.disk_bytes // num_engines,  # each engine writes to a folder of its own
        prefetch_bytes=config.reuse.prefetch_bytes // num_engines,
    )
    prepare = replace(
        config.prepare,
        host_bytes=config.prepare.host_bytes // num_engines,
        disk_bytes=config.prepare.disk_bytes // num_engines,
    )
    return replace(config, runtime=runtime, reuse=reuse, prepare=prepare)


def gpu_of(number: int, visible: str | None, num_gpus: int) -> dict[str, str]:
    """Return the environment variable that gives an engine its GPU; empty without GPUs.

    Args:
        number: of the engine, from 0.
        visible: `CUDA_VISIBLE_DEVICES` of this process; None or empty: it is not set.
        num_gpus: that the engines use.
    """
    if not num_gpus:
        return {}
    names = [name.strip() for name in visible.split(",")] if visible else [str(one) for one in range(num_gpus)]
    return {"CUDA_VISIBLE_DEVICES": names[number % num_gpus]}
