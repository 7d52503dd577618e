"""What each of several engines on one machine gets."""

from dataclasses import replace

import pytest

from stillroom.config.settings import PrepareConfig, ReuseConfig, RuntimeConfig, StillroomConfig
from stillroom.supervision.shares import gpu_of, share_of

WHOLE = StillroomConfig(
    runtime=RuntimeConfig(kv_bytes=900),
    reuse=ReuseConfig(host_bytes=600, prefetch_bytes=300, disk_bytes=500),
    prepare=PrepareConfig(host_bytes=90, disk_bytes=70),
)


@pytest.mark.parametrize("num_engines", [1, 2, 3, 7])
def test_shares_together_are_at_most_the_whole(num_engines: int) -> None:
    share = share_of(WHOLE, num_engines, num_cores=8, num_gpus=0)
    for whole, part in (
        (WHOLE.runtime.kv_bytes, share.runtime.kv_bytes),
        (WHOLE.reuse.host_bytes, share.reuse.host_bytes),
        (WHOLE.reuse.disk_bytes, share.reuse.disk_bytes),
        (WHOLE.reuse.prefetch_bytes, share.reuse.prefetch_bytes),
        (WHOLE.prepare.host_bytes, share.prepare.host_bytes),
        (WHOLE.prepare.disk_bytes, share.prepare.disk_bytes),
        (8, share.runtime.num_threads),
    ):
        assert whole - num_engines < part * num_engines <= whole


def test_own_number_of_threads_is_divided_too() -> None:
    config = replace(WHOLE, runtime=replace(WHOLE.runtime, num_threads=6))
    assert share_of(config, 2, num_cores=64, num_gpus=0).runtime.num_threads == 3
    assert share_of(config, 9, num_cores=64, num_gpus=0).runtime.num_threads == 1


def test_memory_of_a_gpu_is_divided_among_its_engines_only() -> None:
    assert share_of(WHOLE, 4, num_cores=8, num_gpus=4).runtime.kv_bytes == 900
    assert share_of(WHOLE, 4, num_cores=8, num_gpus=2).runtime.kv_bytes == 450
    assert share_of(WHOLE, 3, num_cores=8, num_gpus=2).runtime.kv_bytes == 450
    assert share_of(WHOLE, 4, num_cores=8, num_gpus=4).reuse.host_bytes == 150


def test_engines_take_the_gpus_in_turn() -> None:
    assert [gpu_of(number, None, 2)["CUDA_VISIBLE_DEVICES"] for number in range(3)] == ["0", "1", "0"]
    assert [gpu_of(number, "4, GPU-8f", 2)["CUDA_VISIBLE_DEVICES"] for number in range(3)] == ["4", "GPU-8f", "4"]
    assert gpu_of(0, "4", 0) == {}
