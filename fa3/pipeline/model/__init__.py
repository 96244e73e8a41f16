"""A model of rings and turnstiles that runs anywhere, so small that every interleaving can be tried.

`things` are what warps share: mbarriers, buffers, named barriers, the tensor cores. `machine` lets warps take steps in
any order and says who waits for whom when nobody can. `ring` and `turns` write the programs of the warps, with the
very `Cursor` and the very arrive counts (`Topology`) that the kernels use. `timeline` gives steps a duration.
"""

from .machine import Actor, Deadlock, Machine, State, explore
from .ring import ModelRing, ring_machine
from .things import Buffer, Fault, MBarrier, NamedBarrier, TensorCores
from .timeline import Moment, Timeline, play
from .turns import ModelTurns, turns_machine

__all__ = [
    "Actor",
    "Buffer",
    "Deadlock",
    "Fault",
    "MBarrier",
    "Machine",
    "ModelRing",
    "ModelTurns",
    "Moment",
    "NamedBarrier",
    "State",
    "TensorCores",
    "Timeline",
    "explore",
    "play",
    "ring_machine",
    "turns_machine",
]
