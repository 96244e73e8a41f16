"""Command-line arguments that choose a kernel, the same for every tool that takes one."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa3.config.types import ForwardConfig, KernelKey

KERNELS = ("forward",)


def add_kernel(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The kernel, its head dimensions, mask and dtype, and changes of its row."""
    parser.add_argument("kernel", nargs=None if required else "?", choices=KERNELS, help="which kernel to compile")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="columns of Q and K (default 128)")
    parser.add_argument("--head-dim-v", type=int, metavar="D", help="columns of V (default: as --head-dim)")
    parser.add_argument("--causal", action="store_true", help="with the causal mask")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change the table's row, such as tile_n=112 or algorithm=plain; may be given several times",
    )


def key_of(arguments: argparse.Namespace) -> KernelKey:
    """The key that the command line describes. Raises ValueError for what makes no sense or does not fit an SM."""
    from fa3.config.budget import check_forward
    from fa3.config.table import forward_key

    head_dim_v = arguments.head_dim_v or arguments.head_dim
    key = forward_key(arguments.head_dim, head_dim_v, arguments.causal, arguments.dtype)
    for setting in arguments.set:
        key = dataclasses.replace(key, config=changed(key.config, setting))
    check_forward(key.config)
    return key


def changed(config: ForwardConfig, setting: str) -> ForwardConfig:
    """`tile_n=112` applied to a row. Raises ValueError if there is no such field, or its type does not fit."""
    field, equals, value = setting.partition("=")
    known = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    if not equals or field not in known:
        raise ValueError(f"--set takes FIELD=VALUE with a field of {', '.join(known)}; got {setting!r}")
    old = known[field]
    if isinstance(old, bool):
        new: object = {"true": True, "false": False}[value.lower()] if value.lower() in ("true", "false") else None
    else:
        new = value if isinstance(old, str) else int(value) if value.isdecimal() else None
    if new is None:
        raise ValueError(f"{field} is {old!r} in the row; {value!r} does not fit")
    return dataclasses.replace(config, **{field: new})  # type: ignore[arg-type]
