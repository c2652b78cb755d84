"""How host memory for adapter images is cut, for the arena that does it and for `mlora plan`.

Beside a card it is page-locked, in slabs that images share; torch locks powers of two. Without a
card every image has a block of its own.
"""

ALIGNMENT = 4096
SLAB_BYTES = 256 * 2**20


def aligned(num_bytes: int) -> int:
    """What an image of so many bytes takes of a slab."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def whole_slab(room: int, slab_bytes: int = SLAB_BYTES) -> int:
    """Bytes of the largest slab for which `room` is left; 0 where none is."""
    return min(slab_bytes, 1 << (room.bit_length() - 1)) if room > 0 else 0


def slab_for(image: int, room: int, budget: int, slab_bytes: int = SLAB_BYTES) -> int:
    """Bytes of a new slab that holds an image of `image` bytes, where `room` of `budget` is left.

    Exact only where the power of two is more than the whole budget.
    """
    size = aligned(image)
    wanted = max(1 << (size - 1).bit_length(), whole_slab(room, slab_bytes))
    return size if wanted > budget else wanted


def images_that_fit(budget: int, image: int, *, is_locked: bool) -> int:
    """How many images of one size `budget` bytes hold, page-locked or not."""
    size = aligned(image)
    if not is_locked:
        return budget // size
    count, room = 0, budget
    while (slab := slab_for(image, room, budget)) <= room:
        count += slab // size
        room -= slab
    return count
