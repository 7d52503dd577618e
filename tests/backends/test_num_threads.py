"""CPU quotas of cgroups bound the number of threads."""

import math
from pathlib import Path

import pytest
import torch

from stillroom.backends import num_threads
from stillroom.backends.num_threads import cgroup_cpus, is_free_to_choose, most_threads


def group(root: Path, path: str, **files: str) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content + "\n")


def cpus(tmp_path: Path, lines: str) -> float:
    (tmp_path / "cgroup").write_text(lines)
    return cgroup_cpus(tmp_path / "fs", tmp_path / "cgroup")


def test_quota_of_cgroup_v2_is_the_lowest_on_the_way_up(tmp_path: Path) -> None:
    group(tmp_path / "fs", "kube/pod/one", cpu__max="max 100000")
    assert cpus(tmp_path, "0::/kube/pod/one\n") == math.inf
    group(tmp_path / "fs", "kube/pod", cpu__max="250000 100000")
    assert cpus(tmp_path, "0::/kube/pod/one\n") == 2.5
    group(tmp_path / "fs", "", cpu__max="50000 100000")
    assert cpus(tmp_path, "0::/kube/pod/one\n") == 0.5


def test_quota_of_cgroup_v1_is_read_where_the_group_or_its_mount_is(tmp_path: Path) -> None:
    lines = "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n"
    group(tmp_path / "fs", "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cpus(tmp_path, lines) == math.inf
    group(tmp_path / "fs", "cpu", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert cpus(tmp_path, lines) == 1.5
    group(tmp_path / "fs", "cpu/docker/x", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    assert cpus(tmp_path, lines) == 1.0


@pytest.mark.parametrize("content", ["", "nonsense", "100 0", "max"])
def test_damaged_quotas_count_as_none(tmp_path: Path, content: str) -> None:
    group(tmp_path / "fs", "", cpu__max=content)
    assert cpus(tmp_path, "0::/\n") == math.inf
    assert cgroup_cpus(tmp_path / "fs", tmp_path / "missing") == math.inf


@pytest.mark.parametrize(("quota", "most"), [(math.inf, 8), (16.0, 8), (2.5, 3), (0.2, 1)])
def test_most_threads_is_the_quota_rounded_up(monkeypatch: pytest.MonkeyPatch, quota: float, most: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(num_threads, "cgroup_cpus", lambda: quota)
    assert most_threads() == most


def test_a_fixed_number_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert is_free_to_choose(0, torch.device("cpu"))
    assert not is_free_to_choose(2, torch.device("cpu")) and not is_free_to_choose(0, torch.device("cuda"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not is_free_to_choose(0, torch.device("cpu"))
