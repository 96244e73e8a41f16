"""What a call may look like. Every check raises before anything is launched, and none of them copies or casts.

The kernels read q, k and v where they lie, through TMA. From that come the rules on strides: the last dimension is
contiguous, every other stride is a multiple of 16 bytes and below 2^40 bytes, and the first element is 16-byte aligned.
A dimension of size 1 is never stepped along, so its stride does not matter.

All of this works on fake tensors too, except `check_device` and `check_alignment`, which need the real ones.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from fa3.config.types import DType

DTYPES: dict[torch.dtype, DType] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ITEM_BYTES = 2
TMA_ALIGN = 16
TMA_STRIDE_LIMIT = 1 << 40
MAX_HEAD_DIM = 256
HEAD_DIMS = f"a multiple of 8 from 8 to {MAX_HEAD_DIM} is supported"
CAPABILITY = (9, 0)
GPU_NEEDED = "fa3 needs a Hopper GPU, compute capability 9.0 (H100, H200, H800, H20, GH200)"
LAYOUT = "The layout is (batch, sequence, heads, head_dim); from scaled_dot_product_attention's use .transpose(1, 2)."

LOG2_E = math.log2(math.e)
_FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT32_TINY = torch.finfo(torch.float32).tiny

Strides = tuple[int, ...]


# ------------------------------------------------------------------------------------------------ tensors
def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types, dtypes and shapes: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_kind(name, tensor)
    _check_dtypes(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"fa3: {name} has {tensor.dim()} dimensions, shape {_shape(tensor)}; 4 are wanted: "
                "(batch, sequence, heads, head_dim). Add the missing ones with unsqueeze."
            )
    _check_shapes(q, k, v)


def _check_kind(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"fa3: {name} is {_type(tensor)}; a torch.Tensor is wanted")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"fa3: {name} has layout {tensor.layout}; a strided (dense) tensor is wanted. For a nested tensor, pad it."
        )


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in DTYPES:
            autocast = " (autocast does not reach fa3's arguments)" if torch.is_autocast_enabled("cuda") else ""
            raise TypeError(
                f"fa3: {name} has dtype {tensor.dtype}; torch.float16 and torch.bfloat16 are supported. "
                f"Convert with {name}.to(torch.bfloat16){autocast}."
            )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"fa3: q, k and v must have one dtype, but are {q.dtype}, {k.dtype} and {v.dtype}. Convert with .to(dtype)."
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q has shape {_shape(q)}, k {_shape(k)}, v {_shape(v)}"
    for dim, what in ((0, "batch"), (1, "sequence length"), (2, "head count")):
        if k.shape[dim] != v.shape[dim]:
            raise ValueError(f"fa3: k and v differ in {what}, dimension {dim}: {shapes}. {LAYOUT}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"fa3: q and k differ in batch, dimension 0: {shapes}. {LAYOUT} expand repeats k and v.")
    heads_q, heads_kv = q.shape[2], k.shape[2]
    if heads_q != 0 and (heads_kv == 0 or heads_q % heads_kv != 0):
        raise ValueError(
            f"fa3: q has {heads_q} heads and k and v have {heads_kv}; q's heads must be a multiple of k's and v's "
            f"(grouped-query attention): {shapes}. {LAYOUT}"
        )
    _check_head_dim("q", q.shape[3])
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"fa3: q and k must have the same head_dim (dimension 3): {shapes}. {LAYOUT}")
    _check_head_dim("v", v.shape[3])


def _check_head_dim(name: str, head_dim: int) -> None:
    if not is_head_dim(head_dim):
        raise ValueError(f"fa3: head_dim of {name} is {head_dim}; {HEAD_DIMS}.{_padding(name, head_dim)}")


def is_head_dim(dim: int) -> bool:
    return dim % 8 == 0 and 8 <= dim <= MAX_HEAD_DIM


def _padding(name: str, head_dim: int) -> str:
    """How to get to the next multiple of 8 with zeros, which change no score and add only columns of zeros to O."""
    if not 0 < head_dim < MAX_HEAD_DIM:
        return ""
    pad = -head_dim % 8
    how = f"by {pad} to {head_dim + pad} with torch.nn.functional.pad(x, (0, {pad}))"
    if name == "v":
        return f" Pad v {how}, and cut the output to its first {head_dim} columns."
    return f" Pad q and k {how}, and keep softmax_scale={head_dim}**-0.5."


def legal_strides(name: str, tensor: Tensor) -> Strides | None:
    """The strides to view `tensor` with (in elements), or None if it can be used as it is.

    They differ only in dimensions of size 1. ValueError if TMA cannot take the others.
    """
    shape, strides = tensor.shape, tensor.stride()
    if tensor.numel() == 0:
        return None
    if strides[-1] != 1:
        raise ValueError(
            f"fa3: {name} is not contiguous in its last dimension: stride(-1) is {strides[-1]}, must be 1. "
            f"Use {name}.contiguous(), or lay it out so that head_dim is the fastest dimension."
        )
    legal = [_legal_stride(name, dim, shape[dim], strides[dim], shape[-1]) for dim in range(3)]
    return None if legal == list(strides[:3]) else (*legal, 1)


def _legal_stride(name: str, dim: int, size: int, stride: int, head_dim: int) -> int:
    size_in_bytes = stride * ITEM_BYTES
    if size_in_bytes % TMA_ALIGN == 0 and size_in_bytes < TMA_STRIDE_LIMIT:
        return stride
    if size == 1:
        return head_dim
    allowed = f"multiples of {TMA_ALIGN} bytes below 2^40 bytes"
    raise ValueError(
        f"fa3: {name} has stride({dim}) = {stride} elements, {size_in_bytes} bytes; TMA takes {allowed}. "
        f"Use {name}.contiguous(), or cut {name} out of a buffer whose rows are multiples of {TMA_ALIGN} bytes."
    )


def for_tma(gradient: Tensor) -> Tensor:
    """A gradient as TMA can take it: itself, or a contiguous copy. Autograd makes them with any strides, also of 0."""
    strides = [stride for stride, size in zip(gradient.stride()[:3], gradient.shape[:3], strict=True) if size > 1]
    fits = all(0 < stride * ITEM_BYTES < TMA_STRIDE_LIMIT and stride % 8 == 0 for stride in strides)
    if fits and gradient.stride(3) == 1 and gradient.data_ptr() % TMA_ALIGN == 0 and len(strides) == 3:
        return gradient
    if gradient.is_contiguous() and gradient.data_ptr() % TMA_ALIGN == 0:
        return gradient.as_strided(gradient.shape, _contiguous_strides(gradient.shape))
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _contiguous_strides(shape: tuple[int, ...]) -> Strides:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def check_gradients(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None, o_shape: Strides, lse_shape: Strides, q: Tensor
) -> None:
    """What the backward gets besides q, k and v: shapes, dtypes and devices."""
    wanted = [("do", do, o_shape, q.dtype), ("o", o, o_shape, q.dtype), ("lse", lse, lse_shape, torch.float32)]
    if dlse is not None:
        wanted.append(("dlse", dlse, lse_shape, torch.float32))
    for name, tensor, shape, dtype in wanted:
        _check_kind(name, tensor)
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"fa3: {name} has shape {_shape(tensor)}; {tuple(shape)} is wanted")
        if tensor.dtype != dtype:
            raise TypeError(f"fa3: {name} has dtype {tensor.dtype}; {dtype} is wanted")
        if tensor.device != q.device:
            raise ValueError(f"fa3: {name} is on {tensor.device}, but q is on {q.device}")


def check_device(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One device for all three, and a Hopper GPU."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.device.type != "cuda":
            raise ValueError(
                f"fa3: {name} is on device {tensor.device}; {GPU_NEEDED}. Move it with {name}.to('cuda'). On any "
                "machine, `with fa3.emulate():` runs the same kernel on CPU tensors, step by step and slowly, and "
                "fa3.reference.attention computes the same."
            )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"fa3: q, k and v must be on one device, but are on {q.device}, {k.device} and {v.device}. "
            "Move them with .to(device)."
        )
    capability = torch.cuda.get_device_capability(q.device)
    if tuple(capability) != CAPABILITY:
        raise RuntimeError(
            f"fa3: device {q.device} ({torch.cuda.get_device_name(q.device)}) has compute capability "
            f"{capability[0]}.{capability[1]}; {GPU_NEEDED}."
        )


def check_alignment(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The first elements lie on 16-byte boundaries."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        excess = tensor.data_ptr() % TMA_ALIGN
        if excess:
            raise ValueError(
                f"fa3: {name} starts {excess} bytes after a {TMA_ALIGN}-byte boundary (storage_offset "
                f"{tensor.storage_offset()}); TMA needs it on one. Use {name}.clone(), or slice at multiples of "
                f"{TMA_ALIGN // ITEM_BYTES} elements."
            )


# ------------------------------------------------------------------------------------------------ options
def check_softcap(softcap: Any) -> None:
    if not isinstance(softcap, (int, float)) or isinstance(softcap, bool):
        raise TypeError(f"fa3: softcap is {_type(softcap)}; only the number 0.0 (no cap) is supported")
    if softcap != 0:
        raise NotImplementedError(f"fa3: softcap is {softcap}; only 0.0 (no cap) is supported in this version")


def resolve_scale(softmax_scale: Any, head_dim: int) -> float:
    """The scale that multiplies Q K^T: as given, or 1 / sqrt(D) for None."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    check_scale_type(softmax_scale)
    scale = float(softmax_scale)
    if not math.isfinite(scale) or abs(scale) * LOG2_E > _FLOAT32_MAX:
        raise ValueError(f"fa3: softmax_scale is {scale}; a number that is finite in float32 is wanted")
    return scale


def check_scale_type(softmax_scale: Any) -> None:
    if isinstance(softmax_scale, Tensor):
        raise TypeError(
            "fa3: softmax_scale is a Tensor; a Python number is wanted. softmax_scale.item() makes one (and waits for "
            "the GPU); to scale by a tensor, multiply q by it."
        )
    is_number = isinstance(softmax_scale, (int, float, numbers.Real))
    if isinstance(softmax_scale, bool) or not is_number:
        raise TypeError(
            f"fa3: softmax_scale is {_type(softmax_scale)}; a number is wanted, or None for 1/sqrt(head_dim)"
        )


def kernel_scale(scale: float) -> float:
    """`scale` in units of log2, as the kernels want it: never 0, and never so small that float32 flushes it to 0.

    Masked scores are -inf, and -inf * 0 would be NaN. With float32's smallest normal number, 2^-126, in place of 0
    scores vanish as well: all that fp16 inputs can give, and those of bf16 inputs below about 1e35.
    """
    if scale == 0:  # also -0.0, which is no negative scale
        return _FLOAT32_TINY
    scale_log2 = scale * LOG2_E
    return math.copysign(_FLOAT32_TINY, scale_log2) if abs(scale_log2) < _FLOAT32_TINY else scale_log2


def resolve_mask(causal: Any, window_size: Any, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether the mask is causal (True) or there is none (False); NotImplementedError for any other window.

    Query i sees key j if and only if  i + Sk - Sq - left <= j <= i + Sk - Sq + right,  where -1 is no bound, and causal
    means right = 0. Bounds too wide to hide any key of these lengths are no bounds.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"fa3: causal is {_type(causal)}; True or False is wanted")
    if isinstance(window_size, tuple) and window_size == (-1, -1):
        return causal
    left, right = _window(window_size)
    if causal:
        right = 0
    something = seqlen_q > 0 and seqlen_k > 0
    left_hides = something and 0 <= left < seqlen_k - 1  # the last query sees from key Sk - 1 - left on
    right_hides = something and 0 <= right < seqlen_q - 1  # the first query sees up to key Sk - Sq + right
    if left_hides or (right_hides and right != 0):
        raise NotImplementedError(
            f"fa3: window_size is {(left, right)} for {seqlen_q} queries and {seqlen_k} keys; sliding windows are not "
            "in this version. (-1, -1) with causal=True or False is, and windows that hide nothing else."
        )
    return right == 0


def _window(window_size: Any) -> tuple[int, int]:
    wanted = "a pair of integers (left, right) is wanted, -1 for no bound"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"fa3: window_size is {_type(window_size)}; {wanted}")
    for bound in window_size:
        if isinstance(bound, bool) or not isinstance(bound, numbers.Integral):
            raise TypeError(f"fa3: window_size is {_type(window_size)}; {wanted}")
        if cast(int, bound) < -1:
            raise ValueError(f"fa3: window_size is {window_size!r}; {wanted}")
    return int(window_size[0]), int(window_size[1])


# ------------------------------------------------------------------------------------------------ lists, for warmup
def head_dim_pairs(head_dims: Any) -> list[tuple[int, int]]:
    """(D, Dv) of every entry of `head_dims`, each D or (D, Dv)."""
    wanted = "D or (D, Dv), such as [64, (192, 128)]"
    pairs = []
    for entry in _entries("head_dims", head_dims, wanted):
        pair = (entry, entry) if isinstance(entry, int) else tuple(entry) if isinstance(entry, (tuple, list)) else ()
        if len(pair) != 2 or not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in pair):
            raise TypeError(f"fa3: head_dims holds {_type(entry)}; {wanted} are wanted")
        if not all(map(is_head_dim, pair)):
            raise ValueError(f"fa3: head_dims holds {entry}; {HEAD_DIMS}")
        pairs.append((pair[0], pair[1]))
    return pairs


def list_of_dtypes(dtypes: Any) -> list[torch.dtype]:
    wanted = "torch.float16 and torch.bfloat16"
    chosen = _entries("dtypes", dtypes, f"{wanted}, such as [torch.bfloat16]")
    for dtype in chosen:
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            raise TypeError(f"fa3: dtypes holds {_type(dtype)}; {wanted} are supported")
    return chosen


def list_of_masks(causal: Any) -> list[bool]:
    chosen = _entries("causal", causal, "True and False, such as [True]")
    for mask in chosen:
        if not isinstance(mask, bool):
            raise TypeError(f"fa3: causal holds {_type(mask)}; True or False is wanted")
    return chosen


def _entries(name: str, value: Any, wanted: str) -> list[Any]:
    if isinstance(value, (str, Tensor)) or not isinstance(value, Iterable):
        raise TypeError(f"fa3: {name} is {_type(value)}; a list of {wanted} is wanted")
    return list(value)


# ------------------------------------------------------------------------------------------------ words
def _type(value: object) -> str:
    """What an argument is, in a few words: arrays and tensors by their shape, other values cut where they are long."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return "a Tensor"
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return f"of type {type(value).__module__}.{kind}, shape {shape}"
    return f"{reprlib.repr(value)} of type {kind}"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
