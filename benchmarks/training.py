"""Does a model learn the same with fa3 as with PyTorch's own attention? `python -m benchmarks.training --out F.json`.

A causal transformer reads this repository's own text, character by character, for 300 steps in bfloat16: once with fa3
and once with PyTorch's math backend, from the same weights and on the same batches. Rounding alone drives any two runs
apart, so what counts as agreement is measured too, by runs that differ from the math run as little as rounding does:
one with its attention rounded to 16 bits inside as well, and one whose first weights are changed by a rounding.

fa3 agrees if its loss curve is no farther from the math run than `WORST_RATIO` times the farther of those. Exits with 1
if it does not, or if the model has not learned. Draws the curves beside the file. Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:  # started as a file: the repository's root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa3
from benchmarks import environment

CHARACTERS = 128
"""ASCII; anything else counts as the character 0."""
WORST_RATIO = 2.0
SMOOTHING = 20
"""Steps over which a loss is averaged: one batch is harder than another for everybody alike."""
LEARNED = 0.6
"""The last losses must be below this part of the first: a model that learns nothing agrees with any other."""
NUDGE = 2.0**-8
"""Relative change of the first weights in the nudged run: what rounding to bfloat16 does at most."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (B, S, H, D) -> O, causal."""
Curves = dict[str, list[float]]


@dataclass(frozen=True)
class Setting:
    head_dim: int
    heads: int = 4
    layers: int = 4
    seqlen: int = 512
    batch: int = 16
    steps: int = 300
    warmup: int = 30
    rate: float = 1e-3
    seed: int = 0

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


# ---- text


def corpus() -> Tensor:
    """The package and its pages as one sequence of characters, int64, in the order of their paths."""
    files = [*environment.ROOT.glob("docs/*.md"), *environment.ROOT.glob("*.md"), *environment.ROOT.glob("fa3/**/*.py")]
    text = b"\n".join(file.read_bytes() for file in sorted(files))
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return torch.where(codes < CHARACTERS, codes, 0)


def batches(text: Tensor, setting: Setting, device: torch.device | str) -> Iterator[tuple[Tensor, Tensor]]:
    """(characters, the next characters) of every step, each (B, S); the same ones for the same setting."""
    generator = torch.Generator().manual_seed(setting.seed)
    starts = torch.randint(len(text) - setting.seqlen, (setting.steps, setting.batch), generator=generator)
    text, starts = text.to(device), starts.to(device)
    within = torch.arange(setting.seqlen + 1, device=device)
    for of_step in starts:
        piece = text[of_step[:, None] + within]
        yield piece[:, :-1], piece[:, 1:]


# ---- the model


class Block(nn.Module):
    def __init__(self, setting: Setting, attention: Attention) -> None:
        super().__init__()
        width = setting.width
        self.heads, self.head_dim, self.attention = setting.heads, setting.head_dim, attention
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.before_attention(x)).unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        x = x + self.back(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    """Predicts the next character: (B, S) -> (B, S, `CHARACTERS`)."""

    def __init__(self, setting: Setting, attention: Attention) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, setting.width)
        self.places = nn.Embedding(setting.seqlen, setting.width)
        self.blocks = nn.Sequential(*(Block(setting, attention) for _ in range(setting.layers)))
        self.norm, self.head = nn.LayerNorm(setting.width), nn.Linear(setting.width, CHARACTERS)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


# ---- attention


def with_fa3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fa3.flash_attn_func(q, k, v, causal=True)


def with_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's math backend: 16-bit tensors in and out, float32 inside."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def with_rounded_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same formula with scores and probabilities rounded to 16 bits."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]))
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    return (s.masked_fill(hidden, -math.inf).softmax(-1).to(q.dtype) @ v).transpose(1, 2)


@dataclass(frozen=True)
class Run:
    attention: Attention
    nudge: float = 0.0


RUNS = {
    "fa3": Run(with_fa3),
    "math": Run(with_math),
    "math, rounded inside": Run(with_rounded_math),
    "math, nudged weights": Run(with_math, NUDGE),
}
NOISE = ("math, rounded inside", "math, nudged weights")


# ---- training


def train(setting: Setting, run: Run, text: Tensor, device: torch.device | str) -> list[float]:
    """The loss of every step, in nats a character."""
    torch.manual_seed(setting.seed)
    model = Transformer(setting, run.attention).to(device)
    _nudge(model, run.nudge)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / setting.warmup))
    losses = []
    for characters, following in batches(text, setting, device):
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            scores = model(characters)
        loss = F.cross_entropy(scores.flatten(0, 1).float(), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.detach())
    return [round(float(x), 5) for x in torch.stack(losses).cpu()]


@torch.no_grad()
def _nudge(model: nn.Module, size: float) -> None:
    """Multiplies every weight by up to 1 +- size; for 0, nothing."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        change = size * (2 * torch.rand(weight.shape, generator=generator) - 1)
        weight.mul_(1 + change.to(weight.device))


# ---- agreement


def smooth(losses: Sequence[float]) -> Tensor:
    """The running mean over `SMOOTHING` steps."""
    return torch.tensor(losses, dtype=torch.float64).unfold(0, min(SMOOTHING, len(losses)), 1).mean(-1)


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Root mean square of the difference of two smoothed curves."""
    return float((smooth(a) - smooth(b)).square().mean().sqrt())


@dataclass(frozen=True)
class Verdict:
    distance: float
    """Between fa3 and math."""
    noise: float
    """The largest distance of a run of `NOISE` to math."""
    first_loss: float
    last_loss: float
    """Of fa3: the first step's, and the mean over the last `SMOOTHING` steps."""

    @property
    def complaint(self) -> str | None:
        """Why this is no agreement, in words; None if it is one."""
        if not self.last_loss < LEARNED * self.first_loss:  # written so that NaN is a complaint
            return f"the loss went from {self.first_loss:.3f} to {self.last_loss:.3f}: nothing was learned"
        if not self.distance <= WORST_RATIO * self.noise:
            return f"fa3 is {self.distance:.4f} from math, where rounding makes {self.noise:.4f}"
        return None


def judge(curves: Curves) -> Verdict:
    return Verdict(
        distance(curves["fa3"], curves["math"]),
        max(distance(curves[name], curves["math"]) for name in NOISE),
        curves["fa3"][0],
        float(smooth(curves["fa3"])[-1]),
    )


# ---- the command


def draw(settings: Sequence[Setting], curves: Sequence[Curves], headline: str, path: Path) -> None:
    """A column for each setting: above the losses, below their differences to math."""
    from matplotlib.figure import Figure

    from benchmarks.charts import COLOURS, OURS

    colours = dict(zip(RUNS, (COLOURS[OURS], "#1f1f1f", "#3f5d7d", "#a9a9a9"), strict=True))
    figure = Figure(figsize=(1.0 + 5.2 * len(settings), 6.4), layout="constrained")
    axes = figure.subplots(2, len(settings), squeeze=False, sharex=True, height_ratios=(3, 2))
    for column, (setting, of) in enumerate(zip(settings, curves, strict=True)):
        above, below = axes[0][column], axes[1][column]
        for name, losses in of.items():
            wide = 1.6 if name == "fa3" else 1.0
            above.plot(smooth(losses), color=colours[name], label=name, linewidth=wide)
            if name != "math":
                below.plot(smooth(losses) - smooth(of["math"]), color=colours[name], linewidth=wide)
        above.set_title(f"{setting.layers} layers, {setting.heads} heads of {setting.head_dim}", fontsize=10)
        below.axhline(0.0, color=colours["math"], linewidth=0.8)
        below.set_xlabel("step", fontsize=8)
        for axis in (above, below):
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("loss, nats a character")
    axes[1][0].set_ylabel("difference to math")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(RUNS), frameon=False)
    figure.suptitle(f"Training with fa3 and with PyTorch's math backend, bf16. {headline}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="benchmarks.training", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--head-dim", type=lambda text: [int(x) for x in text.split(",")], default=[64, 128], metavar="N,N")
    p.add_argument("--steps", type=int, default=Setting.steps, help=f"default {Setting.steps}")
    p.add_argument("--out", type=Path, metavar="FILE.json")
    args = p.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.training needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    return compare([Setting(head_dim, steps=args.steps) for head_dim in args.head_dim], "cuda", args.out)


def compare(settings: Sequence[Setting], device: torch.device | str, out: Path | None = None) -> int:
    """Trains every setting in all ways, prints and keeps what came of it; 1 if something is wrong."""
    text = corpus()
    found = [_curves(setting, text, device) for setting in settings]
    verdicts = [judge(of) for of in found]
    for setting, verdict in zip(settings, verdicts, strict=True):
        print(
            f"D={setting.head_dim}: loss {verdict.first_loss:.3f} -> {verdict.last_loss:.3f}; fa3 is "
            f"{verdict.distance:.4f} from math, rounding makes {verdict.noise:.4f}: "
            f"{verdict.complaint or 'they agree'}"
        )
    if out is not None:
        env = environment.describe({})
        rows = [
            {**asdict(setting), **asdict(verdict), "agree": verdict.complaint is None, "loss": of}
            for setting, verdict, of in zip(settings, verdicts, found, strict=True)
        ]
        result = {"env": env, "characters": len(text), "worst_ratio": WORST_RATIO, "smoothing": SMOOTHING, "runs": rows}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result) + "\n")
        headline = f"{env['gpu'] or 'no GPU'}, {str(env['date'])[:10]}, {str(env['commit'])[:12]}"
        with contextlib.suppress(ImportError):  # without matplotlib there is no picture
            draw(settings, found, headline, out.with_suffix(".png"))
    return 1 if any(verdict.complaint for verdict in verdicts) else 0


def _curves(setting: Setting, text: Tensor, device: torch.device | str) -> Curves:
    curves: Curves = {}
    for name, run in RUNS.items():
        before = time.perf_counter()
        curves[name] = train(setting, run, text, device)
        print(f"# D={setting.head_dim} {name}: {time.perf_counter() - before:.1f} s, last loss {curves[name][-1]:.3f}")
    return curves


if __name__ == "__main__":
    sys.exit(main())
