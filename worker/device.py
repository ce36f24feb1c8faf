"""Which processor learns, and with how many threads."""

import os
from pathlib import Path

import torch

from worker.settings import RuntimeSettings, SettingsError


def set_up_device(settings: RuntimeSettings, cgroup: Path = Path("/sys/fs/cgroup")) -> torch.device:
    """The device that the settings ask for, with torch set up for it. SettingsError when it is not there."""
    threads = 1 if settings.deterministic else settings.threads or max(1, available_cpus(cgroup) - 1)
    torch.set_num_threads(threads)
    if settings.deterministic:
        torch.use_deterministic_algorithms(mode=True)
    return find_device(settings.device)


def find_device(name: str) -> torch.device:
    """The device called `name`; auto is CUDA where there is one. SettingsError when it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = (
            f"{torch.cuda.device_count()} CUDA devices are there" if torch.cuda.is_available() else "there is no CUDA"
        )
        raise SettingsError([f"FRESHET_RUNTIME__DEVICE: {name} was asked for, but {there}; allowed: auto, cpu"])
    return device


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use: its affinity, and a container's quota rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return count if quota is None else max(1, min(count, quota))


def _quota(cgroup: Path) -> int | None:
    """CPUs by the cgroup's quota: `cpu.max` of version 2, or the two files of version 1."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if not limit.isdecimal() else -(-int(limit) // int(period))
