"""Small pieces of SASS for the tests, written by hand in the form that nvdisasm prints."""

from __future__ import annotations

from fa3.sass.listing import Listing, parse_sass

HGMMA = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"
COMMIT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
EX2 = "MUFU.EX2 R3, R4"
EXIT = "EXIT"


def wait(most: int) -> str:
    return f"WARPGROUP.DEPBAR.LE gsb0, {most:#x}"


def sass(*lines: str, source: bool = False) -> str:
    """Lines such as "@!P0 BRA `(.L_x_1)" and ".L_x_1:" as a listing with addresses, as `nvdisasm -g -c` prints it."""
    text, address = ["//--------------------- .text.kernel --------------------------", ".text.kernel:"], 0
    for number, line in enumerate(lines):
        if line.endswith(":"):
            text.append(line)
            continue
        if source:
            text.append(f'\t//## File "/home/reader/fa3/kernels/forward.py", line {number + 1}')
        predicate, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        text.append(f"        /*{address:04x}*/              {predicate:>5} {rest} ;")
        address += 16
    return "\n".join(text)


def listing(*lines: str) -> Listing:
    return parse_sass(sass(*lines))
