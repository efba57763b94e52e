"""A decoder of transformers' modelling code, with the interface of our own `Decoder`: its attention
is ours over paged KV, the rest the modules' own, so that a pass can be captured whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.core.request.errors import FieldError
from cbatch.runtime.cpu.transformers_backend import attention as interface
from cbatch.runtime.cpu.transformers_backend.config import bridge, changes_angles
from cbatch.runtime.cpu.transformers_backend.loading import load_net
from cbatch.runtime.cpu.transformers_backend.self_test import compare, reference_of
from cbatch.runtime.cpu.transformers_backend.step import AttentionLayer, Pass
from cbatch.runtime.gpu.attention import PagedAttention
from cbatch.runtime.gpu.decoder import Flat, Hidden
from cbatch.runtime.gpu.one_call import OneCall
from cbatch.runtime.model.config import ModelConfig, ModelError
from triton_kernels.layers.kv_write import kv_write

_PAGE_TOKENS = 16  # while it is compared with itself
_WIDTHS_OF_A_PASS = 12  # of the widest rows that the modules of a layer have at once
# What cannot be queued: it waits for the device, or its shape is what the device says.
_WAITS = {
    *("_local_scalar_dense", "_unique2", "allclose", "argwhere", "bincount", "equal", "is_nonzero"),
    *("item", "masked_select", "nonzero", "unique_dim"),
}
_INDEXES = ("index", "index_put", "index_put_")  # of truth values: as `nonzero`


class _Step(NamedTuple):
    """One pass: what its layers attend with."""

    attention: PagedAttention
    flat: Flat
    unturned: Tensor  # cos and sin of no rotation, for `kv_write`

    def compute(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `LayerStep.compute`."""
        heads, rows, dim = q.shape
        kv_heads = k.shape[0]
        grouped = q.transpose(0, 1).reshape(rows, kv_heads, -1, dim)
        keys, values = (x.transpose(0, 1)[:, :, None].to(q.dtype) for x in (k, v))
        fused = torch.cat([grouped, keys, values], dim=2)
        pages = self.attention.pages(layer.index)
        k_scale, v_scale = self.attention.scales[layer.index]
        here = torch.zeros_like(self.flat.slots)
        kv_write(
            fused, here, self.flat.slots, self.unturned, *pages, k_scale=k_scale, v_scale=v_scale
        )
        queries = fused[:, :, : heads // kv_heads]
        out = self.attention.run(
            layer.index, layer.window, queries, scale=layer.scale, soft_cap=layer.softcap
        )
        return out.view(rows, heads, dim)


class ModellingDecoder:
    """As `Decoder`: no method waits for the device or reads from it."""

    def __init__(self, net: nn.Module, path: Path, dtype: torch.dtype) -> None:
        """`net` is a model for causal LM, on its device, and is changed. Raises ModelError for one
        that does what is not served here."""
        self.net, self.path, self.dtype = net, path, dtype
        self.device = net.get_input_embeddings().weight.device
        self.kv_dtype, self.numerics = dtype, "fast"
        self._pass, self._states = Pass(), _States(net, path)
        interface.register()
        net.set_attn_implementation(interface.NAME)
        if any(_is_mixture(module) for module in net.modules()):
            net.set_experts_implementation("grouped_mm")  # reads no number of rows
        layers, vocab_size = self._probe()
        config = bridge(net.config, path, layers, vocab_size)
        self.config = _served(config, net.config, layers, path)
        self.block_bytes = sum(parameter.nbytes for parameter in net.parameters())
        self.kv_scales = [(1.0, 1.0)] * len(layers)
        self._unturned = torch.tensor([1.0, 0.0], device=self.device)
        self._unturned = self._unturned.repeat(self.config.head_dim // 2, 1)[None].contiguous()

    @property
    def code(self) -> str:
        """Whose code computes it, in words."""
        from transformers import __version__

        return f"transformers {__version__} ({type(self.net).__name__}), with our attention"

    def keeps_bits(self) -> bool:
        """Products and norms are a library's."""
        return False

    def pass_bytes(self, tokens: int) -> int:
        """Of one layer, most of which its modules keep until it ends."""
        c = self.config
        widest = max(c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim)
        return tokens * widest * _WIDTHS_OF_A_PASS * 4

    def cos_sin(self, most_tokens: int) -> Tensor:
        """Of no rotation: keys come turned."""
        return self._unturned

    @torch.inference_mode()
    def forward(
        self, flat: Flat, attention: PagedAttention, cos_sin: Tensor, hidden: Hidden
    ) -> None:
        """All layers over `flat`; fills `hidden.last`."""
        self._pass.elsewhere = _Step(attention, flat, cos_sin)
        try:
            found = self._states.find(flat.tokens.long(), flat.positions.long())
        finally:
            self._pass.elsewhere = None
        hidden.last[: len(flat.tokens)].copy_(found)

    @torch.inference_mode()
    def logits(self, hidden: Hidden, rows: Tensor, out: Tensor) -> None:
        """As `Decoder.logits`."""
        out.copy_(self._states.logits(hidden.last.index_select(0, rows)))

    @torch.inference_mode()
    def _probe(self) -> tuple[list[AttentionLayer], int]:
        """The layers that a pass goes through, and how many logits it gives."""
        with interface.entering(self._pass), _Queued(self.device):
            row = torch.zeros(1, dtype=torch.int64, device=self.device)
            try:
                logits = self._states.logits(self._states.find(row, row))
            except ModelError as error:
                raise ModelError(f"{self.path}: {error}") from None
            except Exception as error:  # whatever modelling code may raise
                raise ModelError(
                    f"{self.path}: {type(self.net).__name__} does not run over a flat batch: "
                    f"{type(error).__name__}: {error!s:.200}"
                ) from error
        if not self._pass.layers:
            raise ModelError(
                f"{self.path}: {type(self.net).__name__} does not call attention by the interface "
                "that transformers has for it"
            )
        return self._pass.layers, logits.shape[-1]


class _States:
    """A model for causal LM in two parts: up to the states behind its last norm, and from there to
    logits, whose scales and soft caps are its own. The second is the whole model, over a body that
    gives what it is told."""

    def __init__(self, net: Any, path: Path) -> None:
        self._net, body = net, net.base_model
        if body is net:
            raise ModelError(f"{path}: {type(net).__name__} has no body apart from its head")
        self._body = body.forward
        self._told: Tensor | None = None
        self._kind: Any = None  # of what the body gives
        body.forward = self._forward

    def _forward(self, *given: Any, **named: Any) -> Any:
        if self._told is None:
            return self._body(*given, **named)
        return self._kind(last_hidden_state=self._told)

    def find(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[T, hidden] of a flat batch."""
        found = self._net.base_model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False
        )
        self._kind = type(found)
        return found.last_hidden_state[0]

    def logits(self, states: Tensor) -> Tensor:
        """[N, vocab] of states [N, hidden]."""
        row = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        self._told = states[None]
        try:
            return self._net(input_ids=row, use_cache=False).logits[0]
        finally:
            self._told = None


class _Queued(TorchDispatchMode):
    """Refuses what a graph cannot hold."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._there = torch.empty(0, device=device)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        away = any(
            isinstance(x, Tensor) and x.dim() and x.device != self._there.device for x in args
        )
        waits = _waits(name, args)
        if waits or away:
            what = "reads from the device" if waits else "computes on the host"
            raise ModelError(f"its code {what} ({name}), which no graph holds; use --device cpu")
        return func(*args, **kwargs or {})


def _waits(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the host waits for what an operation of that name finds."""
    if name in _INDEXES:
        return any(x is not None and x.dtype == torch.bool for x in args[1])
    if name == "repeat_interleave":
        return len(args) < 2 or isinstance(args[1], Tensor)
    return name in _WAITS or (name == "where" and len(args) == 1)


def _is_mixture(module: nn.Module) -> bool:
    """Experts of transformers' interface for them."""
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "up_proj"))
    return any(isinstance(each, nn.Parameter) and each.dim() == 3 for each in weights)


def _served(
    config: ModelConfig, theirs: Any, layers: list[AttentionLayer], path: Path
) -> ModelConfig:
    """As the executor takes it. Raises ModelError for attention that our kernel has not."""
    problem = None
    if len({(layer.heads, layer.kv) for layer in layers}) > 1:
        problem = "its layers have heads of different shapes"
    elif layers[0].kv.key_dim != layers[0].kv.value_dim:
        problem = "its keys are wider than its values, or narrower"
    elif any(layer.sinks is not None for layer in layers):
        problem = "it attends with sinks"
    elif changes_angles(theirs):
        problem = "its angles follow the longest sequence of a step"
    if problem is not None:
        raise ModelError(f"{path}: not served on a GPU: {problem}; use --device cpu")
    inner = getattr(theirs, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * config.hidden_size
    return structs.replace(config, kv_shapes=(), intermediate_size=inner)


def load_modelling_decoder(
    path_or_name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cuda",
    numerics: str = "fast",
    random_weights_seed: int | None = None,
) -> ModellingDecoder:
    """As `load_transformers_model`, on a GPU. Raises ModelError for what cannot be served so."""
    if numerics == "invariant":
        problem = "'invariant' is not to be had of transformers' modelling code on a GPU"
        raise FieldError("numerics", problem, "use fast, or --device cpu")
    net, path, served = load_net(path_or_name, dtype, random_weights_seed)
    net = net.to(device)
    reference = reference_of(net, path)
    decoder = ModellingDecoder(net, path, served)
    compare(OneCall(decoder), reference, block_tokens=_PAGE_TOKENS, own_bits=False)
    return decoder
