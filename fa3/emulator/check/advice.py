"""The kinds of findings, and what to do about each."""

from __future__ import annotations

ADVICE = {
    # ---- who waits for whom
    "deadlock": "Every wait needs as many arrivals, and as many bytes, as its barrier counts: compare the loops around "
    "the wait and around the statements that arrive.",
    "barrier phase": "Nothing orders this behind the end of the phase before, so that under another schedule it counts "
    "for the wrong phase. Wait for the other side of the ring first.",
    "early phase": "The arrive count must be the number of warps that arrive in each lap; take it from the topology.",
    "arrival count": "Initialise the barrier with the arrive count that follows from the edge (Topology).",
    "transaction bytes": "Announce exactly the bytes of the boxes that are loaded for the phase, before the last "
    "arrival of it.",
    "barrier not visible": "Between mbarrier.init and the first use: fence (mbarrier_init_fence) by the thread that "
    "initialised, then a barrier that both sides pass (sync_threads).",
    "barrier initialised twice": "Initialise each mbarrier once, before any warp uses it.",
    "barrier overwritten": "Keep the words of mbarriers apart from data: compare the shared-memory plan.",
    "barrier left mid-phase": "Somebody arrived for a phase that never completes: the two ends of the ring do not take "
    "equally many steps.",
    "named barrier": "Give every event a named barrier of its own, with one thread count, a multiple of 32, and always "
    "the same warps.",
    "named barrier left mid-phase": "Make every role take equally many turns; who arrives once too often leaves an "
    "arrival behind.",
    # ---- clusters
    "CTA not started": "Put the cluster's barrier (barrier.cluster.arrive and wait, by all threads) behind the "
    "initialisation and in front of the first access to another CTA.",
    "exited CTA": "A CTA must not end while others may reach into it: let all threads meet at the cluster's barrier "
    "(arrive with release semantics, and wait) behind the last access, or wait for the last copies and arrivals.",
    # ---- shared memory
    "overwritten while read": "Make the writer wait until every reader has released the stage, and release only what "
    "has been read to the end (wait_group before the arrival).",
    "read before it arrived": "Wait for the barrier that the write reports to, before the first read of the stage.",
    "written twice at once": "Order the two writes by a barrier, or give them different addresses.",
    "no proxy fence": "Put fence.proxy.async behind the writes by threads, before the barrier that hands the data to "
    "TMA or WGMMA.",
    "uninitialised shared memory": "Write the whole buffer before it is read, or read only what was written.",
    # ---- WGMMA and its registers
    "accumulator in flight": "Put wgmma.wait_group, for the group of this WGMMA, before the first use of its "
    "accumulators.",
    "A registers in flight": "Wait for the WGMMA that reads these registers before writing them again.",
    "no wgmma.fence": "Put wgmma.fence between the last ordinary use of the registers and the first wgmma.mma_async "
    "that takes them, on every path.",
    "wgmma never committed": "Close the batch with wgmma.commit_group; no wait covers it otherwise.",
    "wgmma never waited for": "Wait for the last group (wgmma.wait_group 0) before the warp exits.",
    "uninitialised register": "Write the register on every path that leads to the read.",
    # ---- copies at the end of a CTA
    "copy never committed": "Close the copies with cp.async.bulk.commit_group; no wait covers them otherwise.",
    "copy never waited for": "Wait (cp.async.bulk.wait_group.read 0) before the warp exits: shared memory is gone with "
    "the CTA.",
    "load never waited for": "Load only what somebody waits for: a copy that lands after the CTA has ended writes into "
    "the shared memory of the next one.",
    # ---- global memory
    "grid dependency": "Put griddepcontrol_wait in front of the first access, or wait at a barrier for a role that has "
    "executed it.",
    "sums in no fixed order": "Let each CTA wait for its turn before its first sum, and count only behind its last: "
    "a bulk sum is complete behind wait_group without .read; count with release, look with acquire.",
    "race in global memory": "What several CTAs add to can be read or overwritten only where a kernel's end, or a "
    "counter, tells that all of them are done.",
    # ---- launch
    "register budget": "Take the numbers for setmaxnreg from RegisterBudget, and let whole warpgroups execute it.",
    "written twice": "Give every element of the output to one tile; look at the bounds of the tiles and of the grid.",
    "never written": "Cover the output with tiles, also its last rows and columns.",
    "different results": "A result that depends on the schedule means a missing wait or a missing fence; look at the "
    "other findings first.",
    "wrong result": "Compare with the reference element by element; look at the other findings first.",
    "descriptor": "Make the tensor's strides and the box follow the rules of the TMA descriptor.",
}
"""Kind -> advice. Faults of the machine keep their own kind; see FAULT_ADVICE."""

FAULT_ADVICE = {
    "out of bounds": "Check the index against the extent of the buffer, and the buffer against the shared-memory plan.",
    "misaligned": "Align the buffer and its stages to what the access needs (1024 bytes under a 128-byte swizzle).",
    "mbarrier": ADVICE["barrier not visible"],
    "mbarrier arrivals": "More arrivals than the phase counts: the arrive count is too small, or a warp releases a "
    "stage twice.",
    "named barrier": ADVICE["named barrier"],
    "cluster barrier": "Every thread arrives at the cluster's barrier once, then waits there once, in turn.",
    "cluster": "Map both addresses with mapa to the same CTA rank.",
    "divergence": "Let the whole warp execute this together: move it out of the branch, or elect in front of it.",
    "tma": ADVICE["descriptor"],
    "wgmma": "Compare the layout of the operand in shared memory with the descriptor that was built from it.",
    "endless": "The loop around this statement does not end; look at what its condition waits for.",
    "counter": "Every CTA must draw until it gets a number past the end.",
    "unsupported": "The emulator cannot run this instruction; the kernel may be right.",
}
"""Kind of a Fault -> advice."""


def advice_for(kind: str) -> str:
    return ADVICE.get(kind) or FAULT_ADVICE.get(kind) or ""
