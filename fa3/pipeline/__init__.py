"""Who waits for whom: rings, topology, turnstiles, register budgets and roles. It knows nothing of what is computed.

`cursor`, `topology`, `schedule` and `registers` are plain Python; `ring` and `barriers` speak the DSL.
"""

from .cursor import Cursor
from .registers import BUDGETS, RegisterBudget
from .schedule import Role, RoleSchedule, load_and_math
from .topology import Edge, EdgePlan, Topology

__all__ = [
    "BUDGETS",
    "Cursor",
    "Edge",
    "EdgePlan",
    "RegisterBudget",
    "Role",
    "RoleSchedule",
    "Topology",
    "load_and_math",
]
