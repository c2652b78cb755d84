"""What `mlora plan` says fits into host memory is what the arena gives out."""

import pytest
import torch

from multilora_cli.adapters.host_arena import HostArena
from multilora_cli.sizing.host_slabs import images_that_fit

MIB = 2**20


@pytest.mark.parametrize("is_locked", [False, True])
@pytest.mark.parametrize("image", [4097, 13 * MIB, 27_262_976, 84 * MIB, 256 * MIB, 336 * MIB])
@pytest.mark.parametrize("budget", [100 * MIB, 500_000_000, 1024 * MIB, 1500 * MIB])
def test_as_many_as_the_arena_gives_out(
    budget: int, image: int, is_locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlocked(self: HostArena, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)  # never touched

    monkeypatch.setattr(HostArena, "make", unlocked)
    if image < MIB:
        budget //= 64  # fewer to count
    arena, count = HostArena(budget, is_locked), 0
    while arena.allocate(image) is not None:
        count += 1
    assert images_that_fit(budget, image, is_locked=is_locked) == count


def test_unused_slabs_stay_where_they_do_not_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """To pin them anew takes 0.15 s each, for which the device stands still."""
    made: list[int] = []

    def unlocked(self: HostArena, num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(HostArena, "make", unlocked)
    arena = HostArena(8 * MIB, True, slab_bytes=MIB)
    extents = [arena.allocate(MIB) for _ in range(8)]
    assert len(made) == 8
    for extent in extents[:3]:
        assert extent is not None
        arena.release(extent)
    assert arena.room_for(4 * MIB) is None
    assert arena.reserved_bytes == 8 * MIB and arena.free_bytes == 3 * MIB
    assert extents[3] is not None
    arena.release(extents[3])
    assert arena.room_for(4 * MIB) == 4 * MIB
    assert arena.reserved_bytes == 4 * MIB
