"""The threads that read and convert adapters beside the thread that runs the steps."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from multilora_cli.engine.device_memory import use_device

_HELPERS_MAX = 3


def num_helpers() -> int:
    """Threads that a load may use beside its own: a core stays with the steps."""
    return max(0, min(_HELPERS_MAX, len(os.sched_getaffinity(0)) - 2))


def loader_threads(count: int, device: torch.device) -> ThreadPoolExecutor:
    """`count` threads whose torch operations run on the calling thread alone.

    `device` is their own: a thread of another card, cuda:0 where none is set, makes a context
    there, half a gigabyte, when it comes back from a stream of this one (models.base_rows).

    Left to itself, torch cuts an operation on 64 KB of weights up among as many OpenMP threads as
    there are cores, once for every loader thread. They wait for one another spinning, several
    hundred times a load: 45 ms of the 55 that a 27 MB adapter took beside 64 answers on an H200.
    Loads share their work by tensors instead (adapters.crew).
    """
    outside = torch.get_num_threads()
    all_started = threading.Barrier(count + 1)

    def settle() -> None:
        use_device(device)
        torch.get_num_threads()  # a thread's own number is made at its first use, and lasts
        torch.set_num_threads(1)
        all_started.wait()

    threads = ThreadPoolExecutor(count, thread_name_prefix="adapter-loader")
    for _ in range(count):
        threads.submit(settle)
    all_started.wait()
    # Every thread has its own number, but the last one set is also what later threads begin with.
    torch.set_num_threads(outside)
    return threads
