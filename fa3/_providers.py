"""fa3 and the attention libraries that it is compared with, behind one call: private to the demo and the benchmarks.

Only what imports is offered; nothing here is a dependency of the package.

    ours      this package
    fa4       flash-attn-4, `flash_attn.cute` (CuTe DSL)
    fa3_cpp   FlashAttention-3's own C++ build: module `flash_attn_interface`, or `fa3_fwd_interface` (forward, bf16)
    cudnn     torch's scaled_dot_product_attention, cuDNN backend
    fa2       torch's scaled_dot_product_attention, flash backend
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

OURS = "ours"

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
AttentionLse = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Provider:
    """One implementation. All take q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv) and `causal`, which is
    aligned to the bottom right corner, and return O (B, Sq, Hq, Dv)."""

    name: str
    title: str
    """What a chart or a table calls it."""
    version: str
    forward: Attention
    forward_lse: AttentionLse | None = None
    """The same with LSE (B, Hq, Sq): float32, natural logarithm. None where the library's call does not give it."""
    differentiable: bool = True
    """Whether autograd can go through `forward`."""
    deterministic: Attention | None = None
    """As `forward`, but with gradients that are the same bits from run to run; None if the library has no such call."""


class Missing(Exception):
    """Why a provider cannot be offered here."""


def find(only: Iterable[str] | None = None) -> tuple[list[Provider], dict[str, str]]:
    """(the providers that import, in a fixed order; why the others do not). `only` restricts both to these names.

    Raises ValueError for a name that no provider has.
    """
    wanted = list(_FACTORIES) if only is None else list(only)
    for name in wanted:
        if name not in _FACTORIES:
            raise ValueError(f"no provider {name!r}; there are {', '.join(_FACTORIES)}")
    found: list[Provider] = []
    missing: dict[str, str] = {}
    for name, factory in _FACTORIES.items():
        if name not in wanted:
            continue
        try:
            found.append(factory())
        except Exception as error:  # a foreign library may fail at import in any way; the others still count
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return found, missing


def sdpa(name: str, title: str, backend: SDPBackend) -> Provider:
    """torch's own attention held to one backend. Its `is_causal` is aligned to the top left, so unequal lengths are
    refused rather than answered for another mask."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        if causal and q.shape[1] != k.shape[1]:
            raise NotImplementedError("scaled_dot_product_attention aligns its causal mask to the top left")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    return Provider(name, title, f"torch {torch.__version__}", forward)


def _ours() -> Provider:
    import fa3

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
        return fa3.flash_attn_func(q, k, v, causal=causal)

    def forward_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
        return fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True)

    def deterministic(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
        return fa3.flash_attn_func(q, k, v, causal=causal, deterministic=True)

    return Provider(OURS, "fa3 (this package)", fa3.__version__, forward, forward_lse, deterministic=deterministic)


def _fa4() -> Provider:
    # No LSE: asking for one makes it compile a second kernel for each shape, seconds of GPU time for a side check.
    attention = importlib.import_module("flash_attn.cute").flash_attn_func
    provider = _library("fa4", "flash-attn-4 (CuTe DSL)", _version("flash-attn-4"), attention, None)
    return replace(provider, deterministic=_first_of(partial(attention, deterministic=True)))


def _fa3_cpp() -> Provider:
    attention, version = _first_import(
        ("flash_attn_interface", ("flash-attn-3", "flash_attn_3", "tokenspeed-fa3")),
        ("fa3_fwd_interface", ("fa3-fwd",)),
    )
    provider = _library("fa3_cpp", "FlashAttention-3 (C++)", version, attention, "return_attn_probs")
    return replace(provider, differentiable=False)  # the wheels carry the forward alone


def _cudnn() -> Provider:
    return sdpa("cudnn", "cuDNN (torch SDPA)", SDPBackend.CUDNN_ATTENTION)


def _fa2() -> Provider:
    return sdpa("fa2", "FlashAttention-2 (torch SDPA)", SDPBackend.FLASH_ATTENTION)


_FACTORIES: dict[str, Callable[[], Provider]] = {
    OURS: _ours,
    "fa4": _fa4,
    "fa3_cpp": _fa3_cpp,
    "cudnn": _cudnn,
    "fa2": _fa2,
}

NAMES: tuple[str, ...] = tuple(_FACTORIES)


def _library(name: str, title: str, version: str, attention: Callable[..., Any], lse_flag: str | None) -> Provider:
    """A library whose `flash_attn_func` returns O or a tuple that begins with it; (O, LSE) if `lse_flag` is set."""

    def forward_lse(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = attention(q, k, v, causal=causal, **{str(lse_flag): True})
        return out[0], out[1]

    return Provider(name, title, version, _first_of(attention), forward_lse if lse_flag else None)


def _first_of(attention: Callable[..., Any]) -> Attention:
    """A call that returns O, of one that returns O or a tuple that begins with it."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
        out = attention(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return forward


def _first_import(*candidates: tuple[str, tuple[str, ...]]) -> tuple[Callable[..., Any], str]:
    """(flash_attn_func, version) of the first module that imports; each comes with the wheels that may have brought it.

    Raises Missing, with every module's reason.
    """
    reasons = []
    for module, wheels in candidates:
        try:
            attention = importlib.import_module(module).flash_attn_func
        except Exception as error:
            reasons.append(f"{module}: {error}")
        else:
            return attention, _version(*wheels)
    raise Missing("; ".join(reasons))


def _version(*wheels: str) -> str:
    """Name and version of the first of these wheels that is installed; a copied source tree has none."""
    for wheel in wheels:
        try:
            return f"{wheel} {importlib.metadata.version(wheel)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
