"""A GPU decoder that runs transformers' modelling code, with the interface of `Decoder`. Attention
is our kernel over paged KV; all other modules are transformers'. A whole pass can be captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.core.request.errors import FieldError
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.gpu.attention import PagedAttention, Tuning, heads_of
from cbatch.runtime.gpu.decoder import Hidden
from cbatch.runtime.gpu.layers import FlatTokens
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.transformers_backend import attention as attention_interface
from cbatch.runtime.transformers_backend.config import bridge, changes_angles
from cbatch.runtime.transformers_backend.loading import load_net
from cbatch.runtime.transformers_backend.self_test import compare, reference_of
from cbatch.runtime.transformers_backend.step import AttentionLayer, Pass
from triton_kernels.layers.kv_write import kv_write

_PAGE_TOKENS = 16  # page size of the self test after loading
_ACTIVATION_WIDTHS = 12  # estimate: activations of a layer per token, over its widest tensor
# Operations that no graph can hold: they wait for the device, or the shape of their output depends
# on data.
_WAITS = {
    *("_local_scalar_dense", "_unique2", "allclose", "argwhere", "bincount", "equal", "is_nonzero"),
    *("item", "masked_select", "nonzero", "unique_dim"),
}
_INDEXES = ("index", "index_put", "index_put_")  # with a boolean index they wait, as `nonzero` does


class _Step(NamedTuple):
    """Attention of one pass. Each layer calls `compute`."""

    attention: PagedAttention
    flat: FlatTokens
    # Rotary table of angle 0 for `kv_write`; the modules rotate q and k themselves.
    no_rotation: Tensor

    def compute(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K and V to the cache and return the attention output [T, heads, head_dim]. The
        arguments are those of `LayerStep.compute`."""
        m = layer.mixer
        heads, rows, dim = q.shape
        kv_heads = k.shape[0]
        grouped = q.transpose(0, 1).reshape(rows, kv_heads, -1, dim)
        keys, values = (x.transpose(0, 1)[:, :, None].to(q.dtype) for x in (k, v))
        fused = torch.cat([grouped, keys, values], dim=2)
        pages = self.attention.pages(layer.index)
        k_scale, v_scale = self.attention.scales[layer.index]
        zero_positions = torch.zeros_like(self.flat.slots)
        kv_write(
            fused,
            zero_positions,
            self.flat.slots,
            self.no_rotation,
            *pages,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        queries = fused[:, :, : heads // kv_heads]
        out = self.attention.run(
            layer.index, m.window, queries, scale=m.scale, soft_cap=m.soft_cap or None
        )
        return out.view(rows, heads, dim)


class ModellingDecoder:
    """A `Decoder` over transformers' code. `forward` and `logits` never wait for the device."""

    def __init__(self, net: nn.Module, path: Path, dtype: torch.dtype) -> None:
        """`net` is a causal LM on its device; its attention is replaced. Raises ModelError for a
        model whose code or attention cannot be served here."""
        self.net, self.path, self.dtype = net, path, dtype
        self.device = net.get_input_embeddings().weight.device
        self.kv_dtype, self.numerics = dtype, "fast"
        self._pass, self._body = Pass(), _SplitModel(net, path)
        attention_interface.register()
        net.set_attn_implementation(attention_interface.NAME)
        if any(_is_mixture(module) for module in net.modules()):
            net.set_experts_implementation("grouped_mm")  # needs no row counts on the host
        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        with _GraphCheck(self.device):
            layers, vocab_size = attention_interface.probe(
                self.path, net, self._pass, lambda: self._body.logits(self._body.states(row, row))
            )
        config = bridge(net.config, path, layers, vocab_size)
        _require_supported(net.config, layers, path)
        self.config = config
        inner = getattr(net.config, "intermediate_size", None)
        self._inner = inner if isinstance(inner, int) else 4 * config.hidden_size
        self.matrix_bytes = sum(parameter.nbytes for parameter in net.parameters())
        self.kv_scales = [(1.0, 1.0)] * len(layers)
        no_rotation = torch.tensor([1.0, 0.0], device=self.device)  # cosine and sine of angle 0
        self._no_rotation = no_rotation.repeat(1, self.config.attention.key_dim // 2, 1)

    @property
    def code(self) -> str:
        """A description of the modelling code in use."""
        from transformers import __version__

        return f"transformers {__version__} ({type(self.net).__name__}), with our attention"

    def keeps_bits(self) -> bool:
        """Return False: torch's products and norms are not batch-invariant."""
        return False

    def pass_bytes(self, tokens: int) -> int:
        """Return the estimated bytes of one layer's activations for `tokens` tokens."""
        c = self.config
        widest = max(c.hidden_size, self._inner, c.attention.heads * c.attention.key_dim)
        return tokens * widest * _ACTIVATION_WIDTHS * 4

    def cos_sin(self, max_tokens: int) -> Tensor:
        """Return the rotary table of angle 0: the modules have rotated queries and keys already."""
        return self._no_rotation

    @torch.inference_mode()
    def forward(
        self, flat: FlatTokens, attention: PagedAttention, cos_sin: Tensor, hidden: Hidden
    ) -> None:
        """Compute all layers over `flat`; fills `hidden.last`."""
        self._pass.step = _Step(attention, flat, cos_sin)
        try:
            states = self._body.states(flat.tokens.long(), flat.positions.long())
        finally:
            self._pass.step = None
        hidden.last[: len(flat.tokens)].copy_(states)

    @torch.inference_mode()
    def logits(self, hidden: Hidden, rows: Tensor, out: Tensor) -> None:
        """Write logits to `out`, as `Decoder.logits` does."""
        out.copy_(self._body.logits(hidden.last.index_select(0, rows)))


class _SplitModel:
    """A causal LM in two parts: tokens to the states after the final norm, and states to logits.
    For logits, the model's own `forward` runs with its body replaced by the given states. So the
    model's scale and soft cap of logits apply."""

    def __init__(self, net: Any, path: Path) -> None:
        self._net, body = net, net.base_model
        if body is net:
            raise ModelError(f"{path}: {type(net).__name__} has no layers apart from its LM head")
        self._body = body.forward
        self._given_states: Tensor | None = None
        self._output_type: Any = None  # type of the body's output
        body.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._given_states is None:
            return self._body(*args, **kwargs)
        return self._output_type(last_hidden_state=self._given_states)

    def states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the states [T, hidden] of a ragged batch."""
        output = self._net.base_model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False
        )
        self._output_type = type(output)
        return output.last_hidden_state[0]

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [N, vocab] of states [N, hidden]."""
        row = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        self._given_states = states[None]
        try:
            return self._net(input_ids=row, use_cache=False).logits[0]
        finally:
            self._given_states = None


class _GraphCheck(TorchDispatchMode):
    """Raises ModelError for an operation that no CUDA graph can hold."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._on_device = torch.empty(0, device=device)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        on_other_device = any(
            isinstance(x, Tensor) and x.dim() and x.device != self._on_device.device for x in args
        )
        waits = _waits(name, args)
        if waits or on_other_device:
            what = "reads from the device" if waits else "computes on the host"
            raise ModelError(
                f"its code {what} ({name}), which a graph cannot capture; use --device cpu"
            )
        return func(*args, **kwargs or {})


def _waits(name: str, args: tuple[Any, ...]) -> bool:
    if name in _INDEXES:
        return any(x is not None and x.dtype == torch.bool for x in args[1])
    if name == "repeat_interleave":
        return len(args) < 2 or isinstance(args[1], Tensor)
    return name in _WAITS or (name == "where" and len(args) == 1)


def _is_mixture(module: nn.Module) -> bool:
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "up_proj"))
    return any(isinstance(each, nn.Parameter) and each.dim() == 3 for each in weights)


def _require_supported(hf_config: Any, layers: list[AttentionLayer], path: Path) -> None:
    """Raise ModelError for attention that our kernel lacks."""
    problem = None
    mixers = [layer.mixer for layer in layers]
    if len({(m.heads, m.kv_heads, m.key_dim, m.value_dim) for m in mixers}) > 1:
        problem = "its layers have heads of different shapes"
    elif mixers[0].key_dim != mixers[0].value_dim:
        problem = "its keys and values differ in width"
    elif any(layer.sinks is not None for layer in layers):
        problem = "it uses attention sinks"
    elif changes_angles(hf_config):
        problem = "its rotary angles depend on the longest sequence of a step"
    if problem is not None:
        raise ModelError(f"{path}: not supported on a GPU: {problem}; use --device cpu")


def load_modelling_decoder(
    path_or_name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cuda",
    numerics: str = "fast",
    random_weights_seed: int | None = None,
) -> ModellingDecoder:
    """Load a model as `load_transformers_model` does, on a GPU, and compare it with transformers'
    own pass. Raises ModelError for a model that it cannot serve, FieldError for "invariant"."""
    if numerics == "invariant":
        problem = "'invariant' is not supported with transformers' modelling code on a GPU"
        raise FieldError("numerics", problem, "use fast, or --device cpu")
    net, path, net_dtype = load_net(path_or_name, dtype, random_weights_seed)
    net = net.to(device)
    reference = reference_of(net, path)
    decoder = ModellingDecoder(net, path, net_dtype)
    compare(OneCall(decoder), reference, block_tokens=_PAGE_TOKENS, own_bits=False)
    return decoder


class OneCall:
    """A decoder whose `forward` has the arguments of the CPU's `Model`, for self-tests."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self.kv_dtype = decoder, decoder.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: RaggedBatch, kv: KVCache, states: Tensor | None = None) -> Tensor:
        """Return logits fp32 [N, vocab], on the host; fill `states`, on the device."""
        flat, attention = lay_out(self._decoder, batch, kv)
        hidden = Hidden.allocate(len(flat.tokens), self._decoder)
        kept = () if states is None else (states,)
        cos_sin = self._decoder.cos_sin(int(batch.context_lens.max()))
        self._decoder.forward(flat, attention, cos_sin, hidden, *kept)
        rows = _int32_on(batch.logits_index.numpy(), self.device)
        out = torch.empty(len(rows), self.config.vocab_size, dtype=self.dtype, device=self.device)
        self._decoder.logits(hidden, rows, out)
        return out.float().cpu()


def lay_out(
    decoder: Any, batch: RaggedBatch, kv: KVCache, *, first_key: int = 0
) -> tuple[FlatTokens, PagedAttention]:
    """Return a batch's tokens on the decoder's device, and attention planned for them."""
    lens, device = batch.query_lens, decoder.device
    positions = batch.positions.numpy()
    owners = np.repeat(np.arange(len(lens)), lens)
    blocks = batch.block_tables[owners, positions // kv.block_size]
    slots = blocks * kv.block_size + positions % kv.block_size
    arrays = batch.tokens.numpy(), positions, slots
    flat = FlatTokens(*(_int32_on(each, device) for each in arrays))
    heads = heads_of(decoder.config)
    tuning = Tuning.of(heads, decoder.dtype, device, kv.block_size, decoder.dtype)
    tables, count = _int32_on(batch.block_tables, device), len(flat.tokens)
    states = {"first_key": first_key}
    for name, array in (("pages", batch.state_tables), ("slots", batch.state_slots)):
        if array is not None:
            states[f"state_{name}"] = _int32_on(array, device)
    attention = PagedAttention(decoder.config, kv, tables, count, tuning, **states)
    contexts = _int32_on(batch.context_lens, device)
    attention.plan(_int32_on(np.cumsum([0, *lens]), device), contexts)
    return flat, attention


def _int32_on(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(array, np.int32)).to(device)
