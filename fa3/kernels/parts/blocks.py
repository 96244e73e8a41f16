"""The query blocks of all heads and batches, one CTA for each, in the kernels around the backward."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class BlockSpace(NamedTuple):
    """All blocks as one range of numbers: a grid may have 2^31 - 1 CTAs in x, but only 65535 in y and z."""

    count: Int32
    m_blocks: cute.FastDivmodDivisorV2
    heads: cute.FastDivmodDivisorV2

    @classmethod
    def over(cls, m_blocks, heads, batches) -> "BlockSpace":
        """Host side."""
        divisor = cute.fast_divmod_create_divisor_v2
        return cls(m_blocks * heads * batches, divisor(m_blocks), divisor(heads))

    def block(self, number: Int32):
        """(m_block, head, batch) of a CTA."""
        head_of_all, m_block = divmod(number, self.m_blocks)
        batch, head = divmod(head_of_all, self.heads)
        return m_block, head, batch
