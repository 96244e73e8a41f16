"""Cuts a listing into places that a reader knows: each loop that issues matrix instructions, and the rest.

An instruction belongs to the innermost loop around it that issues a matrix instruction itself or in a loop inside it,
so that waiting loops (try, sleep, try again) do not become places of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa3.sass.flow import Graph, Loop
from fa3.sass.listing import Listing, mma_of

MASKS = ("mask.py", "key_mask.py")
"""Files of which every line in a loop belongs to its mask."""


@dataclass(frozen=True)
class Region:
    """The instructions (indices, in address order) of one place. `depth` 0 is outside every loop with a GEMM.

    `main` tells a main loop, which has no further loop with a GEMM inside it, from a loop over tiles around it.
    `trunk` leaves out waiting loops: what a warp runs when nothing keeps it waiting.
    """

    title: str
    depth: int
    main: bool
    indices: tuple[int, ...]
    trunk: tuple[int, ...]


def split(listing: Listing) -> tuple[Region, ...]:
    """The regions of a kernel: outside loops first, then each loop with a GEMM, outer ones first."""
    graph = listing.graph
    loops = [loop for loop in graph.loops if _has_mma(listing, loop)]
    inner = [loop for loop in graph.loops if not _has_mma(listing, loop)]
    waiting = _with_ways_back(graph, {block for loop in inner for block in loop.blocks})
    home = {block: loop for loop in loops for block in loop.blocks}  # outermost first, so the innermost wins
    outside = [block for block in range(len(graph.blocks)) if block not in home]
    regions = [_region(listing, "outside loops", outside, 0, False, waiting)]
    for loop in loops:
        depth = sum(loop.blocks <= other.blocks for other in loops)
        main = not any(other.blocks < loop.blocks for other in loops)
        blocks = sorted(block for block in loop.blocks if home[block] is loop)
        regions.append(_region(listing, "tile loop", blocks, depth, main, waiting))
    return tuple(_name_main_loops(listing, regions))


def _with_ways_back(graph: Graph, waiting: set[int]) -> frozenset[int]:
    """Waiting loops lie out of line, so each ends in a block that only jumps back to the trunk; it belongs to them."""
    back = {
        index
        for index, block in enumerate(graph.blocks)
        if block.end - block.start == 1 and graph.predecessors[index] and waiting.issuperset(graph.predecessors[index])
    }
    return frozenset(waiting | back)


def _has_mma(listing: Listing, loop: Loop) -> bool:
    return any(mma_of(listing.instructions[i]) for block in loop.blocks for i in listing.graph.blocks[block])


def _region(listing: Listing, title: str, blocks: list[int], depth: int, main: bool, waiting: frozenset[int]) -> Region:
    graph = listing.graph
    indices = tuple(i for block in blocks for i in graph.blocks[block])
    trunk = tuple(i for block in blocks if block not in waiting for i in graph.blocks[block])
    return Region(title, depth, main, indices, trunk)


def _name_main_loops(listing: Listing, regions: list[Region]) -> list[Region]:
    """Numbers main loops in address order: "main loop 1 (with the mask)", "main loop 2 (without the mask)"."""
    loops = sorted((region for region in regions if region.main), key=lambda region: region.indices[0])
    masked = [_masks(listing, region) for region in loops]
    differ = any(masked) and not all(masked)
    names = {}
    for number, (loop, masks) in enumerate(zip(loops, masked, strict=True), 1):
        which = f" ({'with' if masks else 'without'} the mask)" if differ else ""
        names[loop.indices] = f"main loop {number}{which}"
    return [replace(region, title=names.get(region.indices, region.title)) for region in regions]


def _masks(listing: Listing, region: Region) -> bool:
    """Whether a source line of the region's instructions lies in a file of masks."""
    sources = (listing.instructions[i].source for i in region.indices)
    return any(source.file.rsplit("/", 1)[-1] in MASKS for source in sources if source)
