"""What an emulated program may do wrong so badly that it cannot go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement


class Fault(Exception):
    """The program did something that has no meaning: an access outside its memory, one arrival too many, a divergent
    warpgroup instruction. `kind` is short and fixed ("out of bounds"); `message` is a sentence about this case."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message
        self.warp: Warp | None = None
        """Who did it, and `at` where; the machine adds them."""
        self.at: Statement | None = None


class Unsupported(Fault):
    """An instruction that the emulator does not know. The message names it, its PTX line and its Python line."""

    def __init__(self, message: str) -> None:
        super().__init__("unsupported", message)
