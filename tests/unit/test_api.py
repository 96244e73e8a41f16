"""The public call: what is refused and in which words, what is accepted, and what then reaches the kernel."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fa3
from fa3 import checks, errors, launch, reference
from fa3.config.table import FORWARD

BF, HF = torch.bfloat16, torch.float16


def qkv(b=1, sq=5, sk=7, hq=4, hkv=2, d=16, dv=None, dtype=BF, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (b, sq, hq, d), (b, sk, hkv, d), (b, sk, hkv, dv or d)
    return tuple(torch.randn(shape, generator=g).to(dtype) for shape in shapes)


def meta(shape, strides=None, dtype=BF):
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


# ------------------------------------------------------------------------------------------------ refusals
REFUSED_TENSORS = {
    "q no tensor": (TypeError, "q is", lambda q, k, v: ([1.0], k, v)),
    "sparse": (TypeError, "layout", lambda q, k, v: (q, k.to_sparse(), v)),
    "float32": (TypeError, "float16", lambda q, k, v: (q.float(), k.float(), v.float())),
    "float64": (TypeError, "dtype", lambda q, k, v: (q.double(), k, v)),
    "mixed": (TypeError, "one dtype", lambda q, k, v: (q, k.half(), v)),
    "fp8": (TypeError, "dtype", lambda q, k, v: tuple(t.to(torch.float8_e4m3fn) for t in (q, k, v))),
    "integers": (TypeError, "dtype", lambda q, k, v: (q, k, v.int())),
    "rank 3": (ValueError, "3 dimensions", lambda q, k, v: (q[0], k, v)),
    "rank 5": (ValueError, "5 dimensions", lambda q, k, v: (q, k, v[None])),
    "batch": (ValueError, "batch", lambda q, k, v: (torch.cat([q, q]), k, v)),
    "k and v length": (ValueError, "sequence length", lambda q, k, v: (q, k, v[:, :-1])),
    "k and v heads": (ValueError, "head count", lambda q, k, v: (q, k, v[:, :, :1])),
    "head ratio": (ValueError, "multiple of k's", lambda q, k, v: (q[:, :, :3], k, v)),
    "no kv head": (ValueError, "multiple of k's", lambda q, k, v: (q, k[:, :, :0], v[:, :, :0])),
    "q and k head_dim": (ValueError, "head_dim", lambda q, k, v: (q, k[..., :8], v)),
    "head_dim 12": (ValueError, "head_dim of q is 12", lambda q, k, v: (q[..., :12], k[..., :12], v)),
    "head_dim 264": (ValueError, "head_dim of q is 264", lambda q, k, v: qkv(d=264)),
    "head_dim 0": (ValueError, "head_dim of q is 0", lambda q, k, v: (q[..., :0], k[..., :0], v)),
    "head_dim of v": (ValueError, "head_dim of v", lambda q, k, v: (q, k, v[..., :4])),
    "last stride": (ValueError, r"stride\(-1\) is 2", lambda q, k, v: (q[..., ::2], k[..., :8], v[..., :8])),
    "row stride": (ValueError, r"v has stride\(2\) = 20 elements, 40 bytes", lambda q, k, v: (q, k, padded(v, 4))),
}


def padded(tensor, by):
    """The same values as a slice of rows that are `by` elements longer."""
    return torch.nn.functional.pad(tensor, (0, by))[..., : tensor.shape[-1]]


def refusal(*arguments, **options) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        fa3.explain(*arguments, **options)
    return str(caught.value)


def test_an_array_is_named_by_its_shape_and_a_long_list_is_cut():
    q, k, v = qkv()
    array = k.float().numpy()
    assert refusal(q, array, v) == "fa3: k is of type numpy.ndarray, shape (1, 7, 2, 16); a torch.Tensor is wanted"
    assert len(refusal(list(range(100_000)), k, v)) < 120
    assert "numpy.ndarray, shape (2,)" in refusal(q, k, v, window_size=array[0, 0, 0, :2])
    assert "numpy.ndarray, shape (2,)" in refusal(q, k, v, causal=array[0, 0, 0, :2])


@pytest.mark.parametrize(
    ("heads_first", "what"), [((4, 9, 2, 7), "multiple of k's"), ((1, 9, 2, 7), "differ in batch")], ids=str
)
def test_swapped_dimensions_get_a_hint(heads_first, what):
    batch, sq, hq, sk = heads_first
    words = refusal(meta((batch, hq, sq, 64)), *[meta((4, hq, sk, 64))] * 2)
    assert what in words and ".transpose(1, 2)" in words and str((batch, hq, sq, 64)) in words


def test_padding_is_explained_where_it_helps():
    """In the words of the message: pad, keep the scale, cut; the result is attention of the unpadded tensors."""
    wide, narrow = meta((1, 5, 2, 104)), meta((1, 5, 2, 100))
    asked = refusal(narrow, narrow, wide)
    assert "Pad q and k by 4 to 104" in asked and "pad(x, (0, 4))" in asked and "softmax_scale=100**-0.5" in asked
    assert "Pad v by 4 to 104" in refusal(wide, wide, narrow) and "first 100 columns" in refusal(wide, wide, narrow)
    for dim in (0, 257, 264):
        assert "Pad" not in refusal(*[meta((1, 5, 2, dim))] * 3)
    q, k, v = (t.double() for t in qkv(d=104, hkv=4))
    q[..., 100:] = k[..., 100:] = v[..., 100:] = 0
    padded_o, padded_lse = reference.attention(q, k, v, softmax_scale=100**-0.5)
    o, lse = reference.attention(q[..., :100], k[..., :100], v[..., :100])
    torch.testing.assert_close(padded_o[..., :100], o)
    torch.testing.assert_close(padded_lse, lse)


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_refused_tensors(name, stand_in):
    error, words, change = REFUSED_TENSORS[name]
    arguments = change(*qkv())
    for call in (fa3.flash_attn_func, fa3.explain):
        with pytest.raises(error, match=words) as caught:
            call(*arguments)
        assert str(caught.value).startswith("fa3: ")
    assert not stand_in.calls and not stand_in.keys


REFUSED_OPTIONS = [
    (TypeError, "softmax_scale", dict(softmax_scale=torch.tensor(0.1))),
    (TypeError, "softmax_scale", dict(softmax_scale="0.1")),
    (TypeError, "softmax_scale", dict(softmax_scale=True)),
    (TypeError, "softmax_scale", dict(softmax_scale=1j)),
    (ValueError, "softmax_scale", dict(softmax_scale=math.nan)),
    (ValueError, "softmax_scale", dict(softmax_scale=-math.inf)),
    (ValueError, "softmax_scale", dict(softmax_scale=3e38)),
    (TypeError, "causal", dict(causal=torch.tensor(True))),
    (TypeError, "causal", dict(causal="yes")),
    (TypeError, "causal", dict(causal=None)),
    (NotImplementedError, "softcap", dict(softcap=30.0)),
    (TypeError, "softcap", dict(softcap=None)),
    (NotImplementedError, "window_size", dict(window_size=(3, 0))),
    (NotImplementedError, "window_size", dict(window_size=(3, 0), causal=True)),
    (NotImplementedError, "window_size", dict(window_size=(-1, 2))),
    (ValueError, "window_size", dict(window_size=(-2, 0))),
    (TypeError, "window_size", dict(window_size=4)),
    (TypeError, "window_size", dict(window_size=(1, 2, 3))),
    (TypeError, "window_size", dict(window_size=(1.5, 0))),
    (TypeError, "window_size", dict(window_size=None)),
]


@pytest.mark.parametrize(("error", "words", "options"), REFUSED_OPTIONS)
def test_refused_options(error, words, options, stand_in):
    for _ in range(2):  # a refusal is never remembered as an answer
        with pytest.raises(error, match=words):
            fa3.flash_attn_func(*qkv(), **options)
    assert not stand_in.calls


def test_autocast_is_named(stand_in, monkeypatch):
    q, k, v = qkv()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "cuda")
    with pytest.raises(TypeError, match=r"dtype torch\.float32.*autocast"):
        fa3.flash_attn_func(q.float(), k.float(), v)


def test_misaligned_base_is_refused_at_every_call(stand_in):
    q, k, v = qkv()
    fa3.flash_attn_func(q, k, v)
    shifted = torch.empty(k.numel() + 8, dtype=BF)[3:][: k.numel()].view(k.shape)
    assert shifted.stride() == k.stride()  # looks the same as k: only its address differs
    with pytest.raises(ValueError, match="k starts 6 bytes after a 16-byte boundary"):
        fa3.flash_attn_func(q, shifted, v)
    assert len(stand_in.calls) == 1


def test_cpu_tensors_are_refused():
    words = r"q is on device cpu; .*Hopper.*9\.0.*`with fa3\.emulate\(\):`.*fa3\.reference\.attention"
    with pytest.raises(ValueError, match=words):
        fa3.flash_attn_func(*qkv())


@pytest.fixture
def fake_gpus(monkeypatch):
    """Tensors on two GPUs that are not there, of the capability that is set."""
    capability = {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability["is"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H20")
    # where there is a GPU, a fake tensor allocates a byte on its device first; the second GPU may not be there
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None, raising=False)
    with FakeTensorMode() as mode:
        shape = torch.empty(1, 5, 2, 16, dtype=BF, device="meta")
        yield capability, [FakeTensor(mode, shape, torch.device("cuda", i)) for i in (0, 1)]


def test_any_gpu_of_capability_9_0_is_accepted_and_no_other(fake_gpus):
    capability, (first, _) = fake_gpus
    capability["is"] = (9, 0)
    checks.check_device(first, first, first)
    for other in ((8, 0), (8, 9), (10, 0), (12, 0)):
        capability["is"] = other
        with pytest.raises(RuntimeError, match=rf"compute capability {other[0]}\.{other[1]}; fa3 needs a Hopper GPU"):
            checks.check_device(first, first, first)


def test_mixed_devices_are_named(fake_gpus):
    capability, (first, second) = fake_gpus
    capability["is"] = (9, 0)
    with pytest.raises(ValueError, match="one device, but are on cuda:0, cuda:1 and cuda:0"):
        checks.check_device(first, second, first)


# ------------------------------------------------------------------------------------------------ any shape, any stride
STRIDE = st.sampled_from([0, 1, 4, 7, 8, 12, 16, 64, 1 << 20, (1 << 39) - 8, 1 << 39, 1 << 40])


@st.composite
def layouts(draw):
    """Shapes and strides of q, k, v: right more often than not in each respect, so that every rule is met alone."""
    small = st.sampled_from([0, 1, 1, 2, 3])
    b, sq, sk, hkv, group = (draw(small) for _ in range(5))
    d, dv = (draw(st.sampled_from([0, 4, 8, 8, 64, 200, 256, 264])) for _ in range(2))
    shapes = [[b, sq, hkv * group, d], [b, sk, hkv, d], [b, sk, hkv, dv]]
    if draw(st.integers(0, 3)) == 0:
        tensor, dim = draw(st.integers(0, 2)), draw(st.integers(0, 3))
        shapes[tensor][dim] += draw(st.sampled_from([1, 8]))
    strides = []
    for shape in shapes:
        natural = [math.prod(max(1, n) for n in shape[i + 1 :]) for i in range(4)]
        if draw(st.integers(0, 2)) == 0:
            natural[draw(st.integers(0, 3))] = draw(STRIDE)
        strides.append(natural)
    return list(zip(shapes, strides, strict=True))


def is_legal(q, k, v):
    """The rules once more, from the contract alone: a list of (shape, strides)."""
    (bq, _, hq, dq), (bk, sk, hk, dk), (bv, sv, hv, dv) = q[0], k[0], v[0]
    if not bq == bk == bv or sk != sv or hk != hv or dq != dk:
        return False
    if any(d not in range(8, 257, 8) for d in (dq, dv)):
        return False
    if hq > 0 and (hk == 0 or hq % hk):
        return False
    for shape, strides in (q, k, v):
        if 0 in shape:
            continue
        stepped = [s for n, s in zip(shape[:3], strides[:3], strict=True) if n > 1]
        if strides[3] != 1 or any(2 * s % 16 or 2 * s >= 2**40 for s in stepped):
            return False
    return True


@settings(max_examples=400)
@given(layouts())
def test_a_layout_is_accepted_exactly_if_it_is_legal(tensors):
    arguments = [meta(shape, strides) for shape, strides in tensors]
    try:
        fa3.explain(*arguments)
        accepted = True
    except ValueError as error:
        accepted = False
        assert str(error).startswith("fa3: ")
    assert accepted == is_legal(*tensors)


@st.composite
def views(draw, shape):
    """This shape cut out of a larger buffer: dimensions permuted, rows padded, odd strides where the size is 1."""
    order = draw(st.permutations([0, 1, 2]))
    extra = draw(st.sampled_from([0, 8, 24]))
    buffer = torch.randn(*(shape[i] for i in order), shape[3] + extra).to(BF)
    tensor = buffer[..., extra:].permute(*(order.index(i) for i in range(3)), 3)
    strides = [draw(st.sampled_from([0, 3, s])) if n == 1 else s for n, s in zip(shape, tensor.stride(), strict=True)]
    return tensor.as_strided(shape, [*strides[:3], 1], tensor.storage_offset())


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_legal_views_are_computed_in_place(stand_in, data):
    draw = data.draw
    b, hkv, group = (draw(st.integers(1, 3)) for _ in range(3))
    sq, sk = (draw(st.integers(1, 9)) for _ in range(2))
    d, dv = (draw(st.sampled_from([8, 16, 40])) for _ in range(2))
    causal, scale = draw(st.booleans()), draw(st.sampled_from([None, 0.0, -0.3, 2.0, 1e-44, -1e-44]))
    q, k, v = (draw(views(s)) for s in ((b, sq, hkv * group, d), (b, sk, hkv, d), (b, sk, hkv, dv)))
    before = [t.clone() for t in (q, k, v)]
    o, lse = fa3.flash_attn_func(q, k, v, scale, causal, return_lse=True)
    want_o, want_lse = reference.attention(q, k, v, scale, causal)
    assert o.is_contiguous() and o.dtype == BF and lse.dtype == torch.float32
    torch.testing.assert_close(o.double(), want_o, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    passed = stand_in.calls[-1][:3]
    assert [t.data_ptr() for t in passed] == [t.data_ptr() for t in (q, k, v)]
    assert all(torch.equal(t, old) for t, old in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize(
    ("b", "sq", "sk", "hq"), [(0, 5, 7, 4), (2, 0, 7, 4), (2, 5, 0, 4), (0, 0, 0, 4), (2, 5, 7, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_problems_launch_nothing(b, sq, sk, hq, causal, stand_in):
    q, k, v = qkv(b, sq, sk, hq, hkv=2)
    o, lse = fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert o.shape == q.shape and lse.shape == (b, hq, sq) and o.dtype == BF and lse.dtype == torch.float32
    assert (o == 0).all() and (lse == -math.inf).all()
    assert not stand_in.keys and fa3.explain(q, k, v).state == "no launch"


# ------------------------------------------------------------------------------------------------ windows
@settings(max_examples=300)
@given(
    sq=st.integers(0, 6),
    sk=st.integers(0, 6),
    left=st.integers(-1, 7),
    right=st.integers(-1, 7),
    causal=st.booleans(),
)
@example(sq=7, sk=7, left=6, right=0, causal=False)
def test_a_window_is_honoured_exactly_if_it_is_the_full_or_the_causal_mask(sq, sk, left, right, causal):
    bound = 0 if causal else right
    seen = torch.ones(sq, sk, dtype=torch.bool)
    for i, j in itertools.product(range(sq), range(sk)):
        at = i + sk - sq
        seen[i, j] = (left < 0 or j >= at - left) and (bound < 0 or j <= at + bound)
    equals = [mask for mask in (False, True) if torch.equal(seen, reference.visible(sq, sk, mask))]
    try:
        assert checks.resolve_mask(causal, (left, right), sq, sk) in equals
    except NotImplementedError:
        assert not equals


# ------------------------------------------------------------------------------------------------ what the kernel gets
def test_calls_that_look_the_same_share_a_plan_and_no_others(stand_in):
    variants = itertools.product((BF, HF), (2, 1), (16, 24), (False, True), (None, 0.5, -0.5))
    for dtype, hkv, d, causal, scale in variants:
        for seed in (0, 1):
            q, k, v = qkv(hkv=hkv, d=d, dtype=dtype, seed=seed)
            o = fa3.flash_attn_func(q, k, v, scale, causal)
            torch.testing.assert_close(o.double(), reference.attention(q, k, v, scale, causal)[0], rtol=1e-2, atol=1e-2)
    assert len(launch._plans) == len(stand_in.keys) == 2 * 2 * 2 * 2 * 3
    assert {key.negative_scale for key in stand_in.keys} == {False, True}


def test_each_launch_has_fresh_outputs_and_the_counter_of_its_stream(stand_in):
    q, k, v = qkv()
    outs = [fa3.flash_attn_func(q, k, v, return_lse=True) for _ in range(5)]
    assert len(stand_in.calls) == 5 and len({call[6] for call in stand_in.calls}) == 1
    assert len({t.data_ptr() for pair in outs for t in pair}) == 10


def test_plans_do_not_pile_up(stand_in, monkeypatch):
    monkeypatch.setattr(launch, "MAX_PLANS", 4)
    for sk in range(1, 12):
        fa3.flash_attn_func(*qkv(sk=sk))
        assert len(launch._plans) <= 4


def test_scale_that_float32_cannot_hold_is_not_zero():
    for scale in (5e-324, 1e-44, 5e-39):
        assert checks.kernel_scale(scale) == 2.0**-126
        assert checks.kernel_scale(-scale) == -(2.0**-126)
    assert checks.kernel_scale(0.0) == checks.kernel_scale(-0.0) == 2.0**-126
    assert checks.kernel_scale(1.0) == pytest.approx(math.log2(math.e))


def test_negative_zero_scale_is_zero(stand_in):
    q, k, v = qkv()
    o = fa3.flash_attn_func(q, k, v, softmax_scale=-0.0)
    torch.testing.assert_close(o.double(), reference.attention(q, k, v, 0.0)[0], rtol=1e-2, atol=1e-2)


def test_failed_launch_names_kernel_config_and_arguments(stand_in):
    stand_in.failure = RuntimeError("CUDA Error Code: 1")
    with pytest.raises(errors.LaunchError) as caught:
        fa3.flash_attn_func(*qkv())
    text = str(caught.value)
    for words in (stand_in.keys[0].name, "ForwardConfig(", "(1, 5, 4, 16)", "CUDA Error Code: 1"):
        assert words in text


# ------------------------------------------------------------------------------------------------ explain and warmup
def test_explain_names_the_kernel_without_a_gpu(stand_in):
    found = fa3.explain(*(meta((1, 70, 2, 72)) for _ in range(3)), causal=True)
    assert found.kernel is not None and found.kernel.startswith("forward_bf16_d96_causal_")
    assert found.config["tile_m"] and found.kernel in str(found) and not stand_in.keys


def test_explain_names_the_kernels_of_the_backward(stand_in):
    q, k, v = (meta((1, 70, 2, 72)) for _ in range(3))
    assert fa3.explain(q, k, v).backward == ()
    k.requires_grad_()
    assert [each.kernel.split("_bf16")[0] for each in fa3.explain(q, k, v).backward] == ["backward_prepare", "backward"]
    q.requires_grad_(), v.requires_grad_()
    found = fa3.explain(q, k, v, causal=True, deterministic=True)
    names = [each.kernel for each in found.backward]
    assert [n.split("_bf16")[0] for n in names] == ["backward_prepare", "backward", "backward_finish"]
    assert "d96_causal" in names[1] and names[1].endswith("ordered") and all(n in str(found) for n in names)
    with torch.no_grad():
        assert fa3.explain(q, k, v, causal=True) == replace(found, backward=())


def test_warmup_covers_the_table_by_default(stand_in):
    names = fa3.warmup()
    assert sorted(names) == sorted(key.name for key in stand_in.keys)
    assert len(set(names)) == 2 * len(FORWARD)


def test_warmup_of_some(stand_in):
    names = fa3.warmup(head_dims=[64, (192, 128)], dtypes=[HF], causal=[True])
    assert [n.rsplit("_m", 1)[0] for n in names] == ["forward_fp16_d64_causal", "forward_fp16_d192v128_causal"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_warmup_of_the_backward(stand_in, deterministic):
    names = fa3.warmup([128], [BF], [True], backward=True, deterministic=deterministic)
    assert [n.split("_bf16")[0] for n in names] == ["forward", "backward_prepare", "backward", "backward_finish"]
    assert [n.endswith("ordered") for n in names] == [False, False, deterministic, False]
    assert names == [key.name for key in stand_in.keys]


def test_warmup_takes_what_can_be_gone_through_only_once(stand_in):
    names = fa3.warmup(head_dims=iter([64, 128]), dtypes=iter([BF, HF]), causal=iter([False, True]))
    assert len(set(names)) == 8


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (TypeError, "head_dims is 64 of type int; a list of D", dict(head_dims=64)),
        (TypeError, "head_dims is '64' of type str", dict(head_dims="64")),
        (TypeError, "head_dims holds '64' of type str", dict(head_dims=["64"])),
        (TypeError, r"head_dims holds \(64, 64, 64\)", dict(head_dims=[(64, 64, 64)])),
        (TypeError, "head_dims holds True", dict(head_dims=[True])),
        (ValueError, "head_dims holds 100; a multiple of 8 from 8 to 256", dict(head_dims=[64, 100])),
        (ValueError, r"head_dims holds \(64, 264\); a multiple of 8", dict(head_dims=[(64, 264)])),
        (TypeError, "dtypes holds 'bf16' of type str; torch.float16 and", dict(dtypes=["bf16"])),
        (TypeError, "dtypes holds torch.float32", dict(dtypes=[torch.float32])),
        (TypeError, "dtypes is torch.bfloat16 of type dtype; a list of", dict(dtypes=BF)),
        (TypeError, "causal is True of type bool; a list of", dict(causal=True)),
        (TypeError, "causal holds 1 of type int", dict(causal=[1])),
    ],
)
def test_warmup_refuses_in_words(error, words, options, stand_in):
    with pytest.raises(error, match=words) as caught:
        fa3.warmup(**options)
    assert str(caught.value).startswith("fa3: ") and not stand_in.keys


# ------------------------------------------------------------------------------------------------ the DSL's version
@pytest.mark.parametrize("version", ["0.0.1", "4.8.0", "4.9.0", "5.0", "nonsense"])
def test_unfit_dsl_is_an_import_error(version, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(ImportError, match=rf"nvidia-cutlass-dsl>=4\.8\.1,<4\.9.*{version}"):
        errors.check_dsl()


@pytest.mark.parametrize("version", ["4.8.1", "4.8.1.post1", "4.8.17"])
def test_tested_dsl_is_accepted(version, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert errors.check_dsl() == version
