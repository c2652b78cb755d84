"""Memory of the machine itself: what an engine on a CPU may take, for the engine and for a plan."""

from pathlib import Path

_CPU_POOL_MAX = 2 * 2**30
_CPU_SHARE = 4  # a quarter of what is free


def cpu_pool_bytes(free: int) -> int:
    """Bytes of the pool on a CPU where nothing else was asked for and `free` bytes are free."""
    return min(_CPU_POOL_MAX, free // _CPU_SHARE)


def free_host_bytes() -> int:
    """Memory this process can still get: of the machine, or of its control group if less."""
    free = _meminfo("MemAvailable")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(min(free, int(limit) - used), 0)


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0
