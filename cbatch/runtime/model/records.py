"""Records of a model: what each of its layers computes. Every interpreter reads these only.

A layer is a mixer and a feed-forward. Each is a branch of the residual stream: it has a norm of its
input, and its output may be normed and scaled before it is added.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Activation = Literal["silu", "gelu_tanh", "relu_squared", "clamped", "xielu"]


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding; type `none` rotates nothing. Each type ignores the fields that it does not
    use.

    `attention_factor` multiplies cos and sin (yarn, longrope); it is 1.0 elsewhere. `divisors`, one
    for each pair of dimensions, divide the frequencies. The first `share` of a head's dimensions
    rotate. With `interleaved`, the dimensions of a pair are adjacent; otherwise dimension i pairs
    with i + rotated / 2.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_tokens: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    share: float = 1.0
    interleaved: bool = False

    def rotated(self, head_dim: int) -> int:
        """Return the number of a head's dimensions that rotate."""
        return int(head_dim * self.share)


class Norm(msgspec.Struct, frozen=True):
    """RMSNorm; with `centred` LayerNorm, which subtracts the mean. `name` is its module in the
    layer. `offset` is added to the weight."""

    name: str
    eps: float
    centred: bool = False
    has_weight: bool = True
    has_bias: bool = False
    offset: float = 0.0


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A branch of the residual stream: x + out_scale * out_norm(branch(norm(x)))."""

    norm: Norm | None = None
    out_norm: Norm | None = None
    out_scale: float = 1.0

    @property
    def adds_plainly(self) -> bool:
        """True if the output is added as it is."""
        return self.out_norm is None and self.out_scale == 1.0


class Attention(Branch, frozen=True, kw_only=True, tag=True):
    """Attention over the last `window` tokens, the token itself included; None: over all.

    Scores are multiplied by `scale` and become soft_cap * tanh(score / soft_cap); 0: no cap.
    `qk_norm` norms each head, or with `norms_whole` all query heads of a token together, and all
    its key heads; with `norms_rotated` after the rotation. With `sinks`, each head has one more
    score in its softmax. With `gate`, each head's output is multiplied by the sigmoid of a gate,
    which follows its query in `q_proj`.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    rope: Rope = Rope()
    window: int | None = None
    soft_cap: float = 0.0
    bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    norms_whole: bool = False
    norms_rotated: bool = False
    sinks: bool = False
    gate: bool = False

    @property
    def group(self) -> int:
        """Return the number of query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_values(self) -> int:
        """Return the numbers in the K and V of one token."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def row_width(self) -> int:
        """Return the width of the fused projection: queries, K, V and gates."""
        gates = self.heads * self.value_dim if self.gate else 0
        return self.heads * self.key_dim + self.kv_values + gates


class Recurrence(Branch, frozen=True, kw_only=True, tag=True):
    """A mixer with a state in place of K and V. First, each channel is convolved over its last
    `kernel` inputs.

    `convolution` (LFM2): gates before and after that, no activation. `delta`: the gated delta rule
    (arXiv:2412.06464). `scan`: Mamba-2 (arXiv:2405.21060), whose keys are B, queries C and values
    dt x, with `min_step` <= dt <= `max_step`. A value head reads key head h / (heads / key_heads),
    or with `tiled` h mod key_heads. The output is gated by SiLU and normed: by `delta` each head
    first, by `scan` each of `groups` parts after the gate.
    """

    rule: Literal["convolution", "delta", "scan"]
    heads: int
    value_dim: int
    kernel: int
    key_heads: int = 0
    key_dim: int = 0
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = False
    norm_eps: float = 0.0
    groups: int = 1
    min_step: float = 0.0
    max_step: float = float("inf")
    tiled: bool = False

    window = None
    kv_values = 0

    @property
    def inner(self) -> int:
        """Return the width of the output."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def row_width(self) -> int:
        """Return the width of the projection: the convolution's inputs, gates and rates."""
        rates = {"convolution": self.inner, "delta": 2 * self.heads, "scan": self.heads}
        return self.channels + self.inner + rates[self.rule]

    @property
    def page_floats(self) -> int:
        """Return the numbers of the state at a block boundary: one of each head, and the last
        inputs of the convolution."""
        states = self.heads * self.key_dim * padded(self.value_dim) if self.key_dim else 0
        return states + (self.kernel - 1) * padded(self.channels)

    @property
    def entry_floats(self) -> int:
        """Return the numbers that a token adds to the state: the convolution's inputs, keys,
        corrected values and cumulative decays."""
        if not self.key_dim:
            return padded(self.channels)
        values = self.heads * (padded(self.value_dim) + 1)
        return padded(self.channels) + padded(self.key_heads * self.key_dim) + values


def padded(count: int) -> int:
    """Return the count rounded up to whole vectors of any processor."""
    return -(-count // 16) * 16


class FeedForward(Branch, frozen=True, kw_only=True, tag=True):
    """down(act(gate(x)) * up(x)), or without `gated` down(act(up(x))). Layers have weights of their
    own for `xielu`."""

    inner: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


class Experts(Branch, frozen=True, kw_only=True, tag=True):
    """A mixture of `count` feed-forwards of inner width `inner`.

    A token uses its `chosen` most likely experts; with `normalized` their weights sum to 1. Every
    token also uses `shared` experts of the same width, weighted by a gate if `shared_gate`.
    Their total width, `shared_inner`, may be less than theirs: the rest is zero.
    `limit` and `alpha` are parameters of the clamped activation. With `sigmoid`, weights are
    sigmoids times `scale` in place of a softmax, and with `corrected` experts are chosen with a
    bias added to them.
    """

    count: int
    chosen: int
    inner: int
    activation: Activation = "silu"
    normalized: bool = True
    shared: int = 0
    shared_inner: int = 0
    shared_gate: bool = True
    bias: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    sigmoid: bool = False
    corrected: bool = False
    scale: float = 1.0


class LayerRecord(msgspec.Struct, frozen=True):
    """A layer. With `parallel`, both branches read its input. `feed_forward` is None without
    one, and where only other code computes it. With `joint`, the mixer reads the input of the
    layer before, which has no feed-forward."""

    mixer: Attention | Recurrence
    feed_forward: FeedForward | Experts | None
    parallel: bool = False
    joint: bool = False


class PairInput(msgspec.Struct, frozen=True):
    """The input of a draft head: the embedding of a token and the hidden state before it.

    Norms of both come first. With `fused`, a linear layer maps the pair to the first layer's input.
    Otherwise the first projections read the pair, and the residual stream is the state, normed if
    `normed_residual`.
    """

    fused: bool
    token_norm: Norm | None = None
    state_norm: Norm | None = None
    normed_residual: bool = False


def is_llama_like(layer: LayerRecord) -> bool:
    """Return whether a layer is one of Llama's: pre-norms, and a gated feed-forward."""
    m, f = layer.mixer, layer.feed_forward
    if not isinstance(m, Attention) or not isinstance(f, FeedForward):
        return False
    if m.norm is None or f.norm is None:
        return False
    norms = [Norm(norm.name, norm.eps) for norm in (m.norm, f.norm)]
    mixer = Attention(
        norm=norms[0],
        heads=m.heads,
        kv_heads=m.kv_heads,
        key_dim=m.key_dim,
        value_dim=m.key_dim,
        scale=m.key_dim**-0.5,
        rope=m.rope,
        window=m.window,
        bias=m.bias,
        out_bias=m.out_bias,
        qk_norm=m.qk_norm and Norm(m.qk_norm.name, m.qk_norm.eps),
    )
    return layer == LayerRecord(mixer, FeedForward(norm=norms[1], inner=f.inner, bias=f.bias))
