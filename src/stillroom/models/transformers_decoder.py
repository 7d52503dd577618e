"""A decoder made of transformers' own model, for architectures that `ModelSpec` does not describe.

transformers lets a model call any attention function that is registered by name. Ours writes the keys and values of the
packed tokens to their slots, and attends over each sequence's context by slot. All else is transformers' code, so that
continuous batching, reuse on all tiers, forks and preemption work with every architecture whose attention goes through
that interface. When a model is loaded, one pass of a few tokens finds out what its attention needs; a comparison with
transformers' own attention refuses the model if anything else is going on.
"""

import copy
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F

from stillroom.errors import ModelError, UnsupportedModelError
from stillroom.models.causal_model import ModelShape
from stillroom.models.key_rotation import rotations
from stillroom.models.packed import LayerKV, PackedInput
from stillroom.models.quantised_files import WidenedFiles, open_weights
from stillroom.models.transformers_output import without_output
from stillroom.ops import cpu_kernels
from stillroom.ops.attention import AttentionPlan, AttentionSpan, attend_spans
from stillroom.ops.attention_observers import AttentionObserver
from stillroom.ops.cpu_compiler import serialised
from stillroom.ops.linear import Linear

# T packed tokens, B rows whose logits are wanted, V vocabulary, S slots, L layers, H query heads, G key/value heads,
# D head dimension, P = D / 2 pairs of dimensions

_NAME = "stillroom"
"""Of the attention function, in transformers' registry."""
_KINDS = frozenset({"full_attention", "sliding_attention"})
_OF_A_COPY = frozenset({"_name_or_path", "transformers_version"})
"""Fields of a config that do not change what is computed."""
_NUM_TOKENS = 24
"""Of the passes at load."""
_NUM_BEHIND = 8
"""Of these, tokens that are computed in a second step, behind the first."""
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_IN_HALF = 0.1
"""Largest relative difference between our logits and those of transformers' attention, median over the tokens: a wrong
mask or scale makes one of the order of 1, rounding in half precision about 0.01."""

_running = threading.local()
"""`attention`: what `_attend` calls in this thread."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of the attention function."""

    layer: int
    q_THD: torch.Tensor
    k_TGD: torch.Tensor
    v_TGD: torch.Tensor
    """Its last dimension can differ from that of the keys."""
    scale: float
    window: int | None
    softcap: float | None
    sinks_H: torch.Tensor | None
    """Logits of a key without value that every query sees (gpt-oss)."""
    has_mask: bool
    is_causal: bool


_Attention = Callable[[AttentionCall], torch.Tensor]
"""Returns the output, [T, H, D of the values]."""


def _attend(  # noqa: PLR0913  transformers' names
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function in transformers' registry: [1, heads, T, D] in, [1, T, heads, D] out."""
    call = AttentionCall(
        layer=int(getattr(module, "layer_idx", None) or 0),
        q_THD=query[0].transpose(0, 1),
        k_TGD=key[0].transpose(0, 1),
        v_TGD=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
        has_mask=attention_mask is not None,
        is_causal=bool(getattr(module, "is_causal", True)),
    )
    attention: _Attention = _running.attention
    return attention(call)[None], None


@contextmanager
def _attention(attention: _Attention) -> Iterator[None]:
    _running.attention = attention
    try:
        yield
    finally:
        del _running.attention


class _Enough(Exception):
    """No further layer is wanted."""


class _Probe:
    """Notes the calls of a pass; its output is zero."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        num_tokens, num_heads, _ = call.q_THD.shape
        return call.q_THD.new_zeros(num_tokens, num_heads, call.v_TGD.shape[-1])


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one layer's attention needs, besides what it is called with."""

    num_kv_heads: int
    window: int | None
    order_D: torch.Tensor | None = None
    """Places of the dimensions of queries and keys in the KV, so that rotated pairs are (i, i + P); None: their own."""


class _Step:
    """The attention of one step."""

    def __init__(
        self,
        decoder: "TransformersDecoder",
        packed: PackedInput,
        layer_kv: LayerKV,
        observer: AttentionObserver | None,
    ) -> None:
        self._decoder, self._packed, self._layer_kv, self._observer = decoder, packed, layer_kv, observer

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        layer, packed = self._decoder.layers[call.layer], self._packed
        head_dim = self._decoder.spec.head_dim
        k_SGD, v_SGD = self._layer_kv(call.layer)
        if layer.num_kv_heads < k_SGD.shape[1]:
            k_SGD, v_SGD = k_SGD[:, : layer.num_kv_heads], v_SGD[:, : layer.num_kv_heads]
        q_THD = _padded(call.q_THD, head_dim, layer.order_D)
        k_SGD[packed.slots_T] = _padded(call.k_TGD, head_dim, layer.order_D).to(k_SGD.dtype)
        v_SGD[packed.slots_T] = _padded(call.v_TGD, head_dim).to(v_SGD.dtype)
        if call.layer + 1 == self._decoder.num_computed:
            raise _Enough
        if q_THD.device.type == "cpu":
            q_THD = q_THD.float()  # what the kernels read
        q_THD = q_THD.contiguous()
        if self._observer is not None:
            self._observer.observe(q_THD, k_SGD, call.scale, layer.window, call.softcap)
        assert isinstance(packed.plan, AttentionPlan)
        if call.sinks_H is not None or not k_SGD.is_contiguous():
            sinks_H = None if call.sinks_H is None else call.sinks_H.float()
            kv, spans = (k_SGD, v_SGD), packed.plan.spans
            out_THD = attend_spans(q_THD, kv, spans, call.scale, layer.window, call.softcap, sinks_H)
        else:
            out_THD = packed.plan.attend(q_THD, (k_SGD, v_SGD), call.scale, layer.window, call.softcap)
        return out_THD[..., : call.v_TGD.shape[-1]].to(call.q_THD.dtype)


def _padded(x_TGD: torch.Tensor, head_dim: int, order_D: torch.Tensor | None = None) -> torch.Tensor:
    if x_TGD.shape[-1] < head_dim:
        x_TGD = F.pad(x_TGD, (0, head_dim - x_TGD.shape[-1]))
    return x_TGD if order_D is None else x_TGD[..., order_D]


class _Product(torch.nn.Linear):
    """A linear layer that computes few rows with our kernels, which read the weights once for all of them."""

    product: Linear

    @classmethod
    def replace_in(cls, model: torch.nn.Module) -> None:
        """Make this of all linear layers of a model on a CPU; their weights stay where they are."""
        for module in model.modules():
            if type(module) is torch.nn.Linear and module.weight.dtype in (torch.float32, torch.bfloat16):
                product = Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())
                if product.kernel_arrays is not None:
                    module.__class__ = cls
                    cast("_Product", module).product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        num_rows = x.numel() // x.shape[-1]
        if not 0 < num_rows <= self.product.most_rows:
            return super().forward(x)
        return self.product(x.reshape(num_rows, -1).float()).to(x.dtype).view(*x.shape[:-1], -1)


class TransformersDecoder:
    """See `CausalModel`. What it calls hidden states are logits already: models differ in how they make them."""

    has_fixed_launches = False

    def __init__(self, model: Any, max_model_len: int = 0) -> None:
        """
        Args:
            model: a causal model of transformers, on its device, that uses our attention (`load` makes it).
            max_model_len: longest sequence that will run; 0: what the config says.

        Raises:
            UnsupportedModelError: the model does something that cannot be computed by slots; the text says what.
        """
        self._model = model.eval()
        if model.device.type == "cpu":
            _Product.replace_in(model)
        self._config = model.config.get_text_config()
        self.device, self.dtype = torch.device(model.device), model.dtype
        self.activation_dtype = self.dtype
        _check_config(self._config)
        with _refusing_errors(self._config):
            calls = self._probe()
        windows, longest = _windows(self._config, calls)
        self.layers = [_Layer(call.k_TGD.shape[1], window) for call, window in zip(calls, windows, strict=True)]
        self.spec = ModelShape(
            vocab_size=int(self._config.vocab_size),
            num_layers=len(calls),
            num_kv_heads=max(layer.num_kv_heads for layer in self.layers),
            head_dim=max(x.shape[-1] for call in calls for x in (call.k_TGD, call.v_TGD)),
            max_positions=min(max_model_len or longest, longest),
        )
        self.num_computed = len(calls) + 1
        """The pass ends with this layer."""
        self.inv_freq_LP = torch.zeros(self.spec.num_layers, self.spec.head_dim // 2, device=self.device)
        """See `CausalModel`. Zero for layers without a rotation that was recognised."""
        with _refusing_errors(self._config):
            self._find_rotations([call.k_TGD.shape[-1] for call in calls])
            self._compare()

    @property
    def identity(self) -> str:
        """See `CausalModel`."""
        import transformers

        config = {name: value for name, value in self._model.config.to_dict().items() if name not in _OF_A_COPY}
        return f"transformers {transformers.__version__} {json.dumps(config, sort_keys=True, default=str)}"

    @serialised
    @torch.inference_mode()
    def hidden_states(
        self, packed: PackedInput, layer_kv: LayerKV, observer: AttentionObserver | None = None
    ) -> torch.Tensor:
        """See `CausalModel`."""
        if self.device.type == "cpu":
            cpu_kernels.use_threads()
        try:
            with _attention(_Step(self, packed, layer_kv, observer)):
                return self._run(packed.token_ids_T, packed.positions_T, packed.wanted_B)
        except _Enough:
            return torch.zeros(len(packed.wanted_B), self.spec.vocab_size, device=self.device)

    def logits(self, hidden_BM: torch.Tensor) -> torch.Tensor:
        """See `CausalModel`."""
        return hidden_BM.float()

    def first_layers(self, count: int) -> "TransformersDecoder":
        """See `CausalModel`."""
        shallow = copy.copy(self)
        shallow.num_computed = min(count, self.spec.num_layers)
        shallow.spec = replace(self.spec, num_layers=shallow.num_computed)
        return shallow

    def _run(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, wanted_B: torch.Tensor) -> torch.Tensor:
        found = self._model(
            input_ids=token_ids_T[None], position_ids=positions_T[None], use_cache=False, logits_to_keep=wanted_B
        )
        logits_BV: torch.Tensor = found.logits[0]
        return logits_BV

    def _tokens(self) -> torch.Tensor:
        return (torch.arange(_NUM_TOKENS, device=self.device) * 7919 + 11) % int(self._config.vocab_size)

    @torch.inference_mode()
    def _probe(self) -> list[AttentionCall]:
        """Return what each layer calls the attention function with, in order of layers."""
        places, probe = torch.arange(_NUM_TOKENS, device=self.device), _Probe()
        with _attention(probe):
            self._run(self._tokens(), places, places[-1:])
        calls, num_layers = sorted(probe.calls, key=lambda call: call.layer), int(self._config.num_hidden_layers)
        if not calls:
            _refuse(self._config, "its attention does not go through transformers' interface (AttentionInterface)")
        if [call.layer for call in calls] != list(range(num_layers)):
            found = f"{len(calls)} times, for {len({call.layer for call in calls})} of its {num_layers} layers"
            _refuse(self._config, f"attention is called {found}, and not once for each")
        if any(call.has_mask for call in calls):
            _refuse(self._config, "it makes masks of its own, by which tokens see each other")
        if not all(call.is_causal for call in calls):
            _refuse(self._config, "tokens see those behind them, so it is no decoder")
        if any(call.k_TGD.shape[0] != _NUM_TOKENS for call in calls):
            _refuse(self._config, "its layers have keys of more than the tokens of the prompt")
        return calls

    def _keys_at(self, first_position: int) -> torch.Tensor:
        """Keys of some tokens from this position on, as the KV holds them, [L, T, G, D]."""
        kv = self._store(_NUM_TOKENS)
        places = torch.arange(_NUM_TOKENS, device=self.device)
        spans = [AttentionSpan(0, _NUM_TOKENS, slice(0, _NUM_TOKENS), _NUM_TOKENS)]
        self.hidden_states(PackedInput(self._tokens(), places + first_position, places, spans, []), _layers_of(kv))
        return kv[0]

    def _store(self, num_slots: int) -> torch.Tensor:
        """K and V of all layers, [2, L, S, G, D]."""
        spec = self.spec
        shape = (2, spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _find_rotations(self, head_dims: list[int]) -> None:
        """Find how each layer turns its keys: compute the same tokens at two positions, try each rotation of the model.

        What is found is checked over the whole range of positions before keys are moved (`placement_check`).
        """
        far = min(97, self.spec.max_positions - _NUM_TOKENS)
        if far <= 0:
            return
        near_LTGD, far_LTGD = self._keys_at(0).float(), self._keys_at(far).float()
        for index, head_dim in enumerate(head_dims):
            keys = near_LTGD[index], far_LTGD[index]
            found = min(rotations(self._model, head_dim, self.spec.head_dim), key=lambda one: one.error(*keys, far))
            self.layers[index] = replace(self.layers[index], order_D=None if found.keeps_order else found.order_D)
            self.inv_freq_LP[index] = found.inv_freq_P

    @torch.inference_mode()
    def _compare(self) -> None:
        """Compare logits with those of transformers' own attention; raises UnsupportedModelError if they differ."""
        places = torch.arange(_NUM_TOKENS, device=self.device)
        kv = self._store(2 * _NUM_TOKENS)
        slots_T = torch.randperm(2 * _NUM_TOKENS, generator=torch.Generator().manual_seed(0))[:_NUM_TOKENS]
        slots_T = slots_T.to(self.device)
        ours = []
        for start, end in ((0, _NUM_TOKENS - _NUM_BEHIND), (_NUM_TOKENS - _NUM_BEHIND, _NUM_TOKENS)):
            spans = [AttentionSpan(0, end - start, slots_T[:end], end)]
            rows = slice(start, end)
            packed = PackedInput(self._tokens()[rows], places[rows], slots_T[rows], spans, list(range(end - start)))
            ours.append(self.hidden_states(packed, _layers_of(kv)).float())
        self._model.set_attn_implementation("eager")
        try:
            theirs_TV = self._run(self._tokens(), places, places).float()
        finally:
            self._model.set_attn_implementation(_NAME)
        errors_T = (torch.cat(ours) - theirs_TV).norm(dim=1) / theirs_TV.norm(dim=1).clamp_min(1e-12)
        error = float(errors_T.median())
        if not error <= _TOLERANCE.get(self.dtype, _TOLERANCE_IN_HALF):
            _refuse(self._config, f"its logits differ by {error:.1%} from those of transformers' own attention")


@contextmanager
def _refusing_errors(config: Any) -> Iterator[None]:
    """Refuse a model whose first passes stop: it calls attention in another way than ours is written for."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        _refuse(config, f"its code in transformers stops ({type(error).__name__}: {str(error).splitlines()[0]})")


def _layers_of(kv: torch.Tensor) -> LayerKV:
    return lambda layer: (kv[0, layer], kv[1, layer])


def _check_config(config: Any) -> None:
    """Raise UnsupportedModelError for what a pass of a few tokens does not show."""
    if getattr(config, "is_encoder_decoder", False):
        _refuse(config, "it has an encoder, and its decoder reads the encoder's output (cross attention)")
    unknown = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if unknown:
        _refuse(
            config,
            f"layers of type {', '.join(sorted(unknown))} are not computed here, only {' and '.join(sorted(_KINDS))}",
        )
    if getattr(config, "index_topk", None):
        _refuse(config, "its attention chooses the tokens that it reads (index_topk)")
    if any(one.get("rope_type") == "dynamic" for one in _rope_parameters(config)):
        _refuse(config, "RoPE scaling 'dynamic' gives kept keys other frequencies in longer prompts")


def _rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of each RoPE: one, or one for each type of layer."""
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    by_type = [one for one in parameters.values() if isinstance(one, Mapping)]
    return by_type or [parameters]


def _windows(config: Any, calls: list[AttentionCall]) -> tuple[list[int | None], int]:
    """Return each layer's window, and the longest sequence.

    Where the config has a window, but neither its types of layers nor the calls say which layers use it, sequences end
    with the window. A longrope model computes with the frequencies of its original length.
    """
    longest, window = int(getattr(config, "max_position_embeddings", None) or 2048), None
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == "longrope":
            original = getattr(config, "original_max_position_embeddings", None)
            longest = min(longest, int(rope.get("original_max_position_embeddings") or original or longest))
    if getattr(config, "use_sliding_window", True):
        window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return [int(window) if kind == "sliding_attention" and window else None for kind in kinds], longest
    windows = [call.window for call in calls]
    if window is not None and not any(windows):
        longest = min(longest, int(window))
    return windows, longest


def _refuse(config: Any, reason: str) -> NoReturn:
    raise UnsupportedModelError(
        f"model_type {config.model_type!r} cannot run here: {reason}. docs/models.md says what can; or let another "
        "engine serve it, and name that engine's address (--base-url)"
    )


def _from_widened(
    folder: Path, files: WidenedFiles, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Make the model of a quantised checkpoint as if it were not quantised; return it and what was missing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for one in {id(part): part for part in (config, config.get_text_config())}.values():
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    weights = {}
    for name in files:
        tensor = files.get(name, is_passing=True)
        weights[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    files.unmap()
    found: tuple[Any, dict[str, Any]] = type(empty).from_pretrained(
        None, config=empty.config, state_dict=weights, **options
    )
    return found


def load(folder: Path, device: torch.device, dtype: torch.dtype, max_model_len: int = 0) -> TransformersDecoder:
    """Load a checkpoint with transformers, from local files only; code in the checkpoint is never run.

    Quantised weights are widened, all in memory.

    Raises:
        UnsupportedModelError: transformers does not know the architecture, or it cannot be computed by slots.
        ModelError: the files are damaged, or weights are missing.
    """
    from transformers import AutoModelForCausalLM, __version__
    from transformers.modeling_utils import AttentionInterface

    files = open_weights(folder)  # it has safetensors, which run no code
    AttentionInterface.register(_NAME, _attend)
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    options |= {"dtype": dtype, "attn_implementation": _NAME}
    try:
        with without_output():
            if isinstance(files, WidenedFiles):
                model, report = _from_widened(folder, files, dtype, options)
            else:
                model, report = AutoModelForCausalLM.from_pretrained(folder, **options)
    except (ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        if error.args == (_NAME,):  # it looks up the name in a table of its own
            raise UnsupportedModelError(
                f"{folder}: its attention does not go through transformers' interface"
            ) from None
        raise UnsupportedModelError(
            f"{folder} cannot be loaded: Stillroom has no code for this architecture, and transformers {__version__} "
            f"says: {str(error).splitlines()[0]}"
        ) from error
    except (RuntimeError, OSError) as error:
        raise ModelError(f"{folder} cannot be read: {str(error).splitlines()[0]}; download it again") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} tensors, such as {missing[0]}; download it again")
    return TransformersDecoder(model.to(device), max_model_len)
