"""Small pieces of SASS and PTX for the tests, written by hand as nvdisasm and the DSL's compiler print them."""

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


def mbarrier_wait(address: str, parity: str) -> str:
    """`mbarrier_wait` as inline assembly: a loop of its own, with labels that every copy of it repeats.

    It is called in line 7; the lines inside are the compiler's, which counts on."""
    return f"""
	.loc	1 7 20
	// begin inline asm
	{{
	.reg .pred       P1;
	.loc	1 9 20
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [{address}], {parity}, 10000000;
	@P1 bra.uni DONE;
	bra.uni     LAB_WAIT;
	DONE:
	}}
	// end inline asm"""


def kernel(*body: str) -> str:
    inside = "\n\t".join(body)
    return f"""//
.version 9.4
.target sm_90a
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];

.visible .entry forward(
	.param .align 4 .b8 forward_param_0[4]
)
.reqntid 384, 1, 1
{{
	.reg .pred 	%p<50>;
	.reg .b32 	%r<1304>;
	.loc	1 5 0
	{inside}
	ret;
}}
	.file	1 "/home/reader/fa3/pipeline/ring.py"
"""


def loop(*body: str, name: str = "$L__BB0_1") -> list[str]:
    again = ["add.s32 %r9, %r9, -1;", "setp.ne.b32 %p1, %r9, 0;", f"@%p1 bra {name};"]
    return [f"{name}:", '.pragma "nounroll";', *body, *again]
