"""Command-line arguments that choose a kernel, the same for every tool that takes one."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fa3.config.backward import AnyKey, BackwardConfig, BackwardKey
    from fa3.config.types import ForwardConfig, KernelKey

    Config = TypeVar("Config", ForwardConfig, BackwardConfig)

KERNELS = ("forward", "backward", "backward_prepare", "backward_finish")
ONLY_OF = {"deterministic": "backward", "dlse": "backward_prepare"}
"""Switch -> the only kernel that it changes."""


def add_kernel(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The kernel, its head dimensions, mask and dtype, and changes of its row."""
    parser.add_argument("kernel", nargs=None if required else "?", choices=KERNELS, help="which kernel to compile")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="columns of Q and K (default 128)")
    parser.add_argument("--head-dim-v", type=int, metavar="D", help="columns of V (default: as --head-dim)")
    parser.add_argument("--causal", action="store_true", help="with the causal mask")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--deterministic", action="store_true", help="backward: dQ is summed in a fixed order")
    parser.add_argument(
        "--wanted",
        choices=("q", "k", "v", "qk", "qv", "kv", "qkv"),
        default="qkv",
        help="backward: the gradients that are computed (default qkv)",
    )
    parser.add_argument("--dlse", action="store_true", help="backward_prepare: with a gradient of LSE")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change the table's row, such as tile_n=112 or algorithm=plain; may be given several times",
    )


def key_of(arguments: argparse.Namespace) -> AnyKey:
    """The key that the command line describes. Raises ValueError for what makes no sense or does not fit an SM."""
    for switch, kernel in ONLY_OF.items():
        if getattr(arguments, switch) and arguments.kernel != kernel:
            raise ValueError(f"--{switch} is for {kernel}; the kernel is {arguments.kernel}")
    return _forward_key(arguments) if arguments.kernel == "forward" else _backward_key(arguments)


def _forward_key(arguments: argparse.Namespace) -> KernelKey:
    from fa3.config.budget import check_forward
    from fa3.config.table import forward_key

    key = forward_key(*_dims(arguments), arguments.causal, arguments.dtype)
    return dataclasses.replace(key, config=check_forward(_changed(key.config, arguments.set)))


def _backward_key(arguments: argparse.Namespace) -> BackwardKey:
    from fa3.config.backward import backward_keys
    from fa3.config.backward_budget import check_backward
    from fa3.config.backward_table import backward_config

    row = backward_config(*_dims(arguments), arguments.causal)
    config = check_backward(_changed(row, arguments.set))
    keys = backward_keys(config, arguments.dtype, arguments.wanted, arguments.dlse, arguments.deterministic)
    for key in keys:
        if key.part == arguments.kernel:
            return key
    raise ValueError(f"there is no {arguments.kernel} where only d{arguments.wanted.upper()} is wanted")


def _dims(arguments: argparse.Namespace) -> tuple[int, int]:
    return arguments.head_dim, arguments.head_dim_v or arguments.head_dim


def _changed(config: Config, settings: list[str]) -> Config:
    for setting in settings:
        config = changed(config, setting)
    return config


def changed(config: Config, setting: str) -> Config:
    """`tile_n=112` applied to a row. Raises ValueError if there is no such field, or its type does not fit."""
    field, equals, value = setting.partition("=")
    known = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    if not equals or field not in known:
        raise ValueError(f"--set takes FIELD=VALUE with a field of {', '.join(known)}; got {setting!r}")
    old = known[field]
    new: Any
    if isinstance(old, bool):
        new = {"true": True, "false": False}.get(value.lower())
    else:
        new = value if isinstance(old, str) else int(value) if value.isdecimal() else None
    if new is None:
        raise ValueError(f"{field} is {old!r} in the row; {value!r} does not fit")
    return dataclasses.replace(config, **{field: new})
