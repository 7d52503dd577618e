"""Reads a quantised checkpoint as if it were not quantised: each weight is widened when it is read.

`open_weights` opens a checkpoint of either kind. A layout that cannot be read is refused by name, and so are tensors
that the named layout does not explain: weights are never computed from a part of what the checkpoint says.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stillroom.errors import ModelError, UnsupportedModelError
from stillroom.models.checkpoint import WeightFiles, read_json

if TYPE_CHECKING:  # refusing a checkpoint needs no tensors
    import torch

    from stillroom.models.quantised_formats import Layout

_METHODS = (
    "gptq",
    "awq",
    "compressed-tensors",
    "fp8",
    "fbgemm_fp8",
    "modelopt",
    "bitsandbytes",
    "mlx",
    "mxfp4",
)
_REMEDY = (
    "Use the unquantised checkpoint or a layout that docs/models.md lists, or let another engine serve the model and "
    "name that engine's address (--base-url)"
)
_SIDE_FILES: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "quantize_config.json": lambda found: {"quant_method": "gptq", **found},
    "quant_config.json": lambda found: {"quant_method": "awq", "bits": found.get("w_bit"), **found},
    "hf_quant_config.json": lambda found: {"quant_method": "modelopt", **(found.get("quantization") or {})},
}
"""Files beside config.json in which older tools name the layout."""
_PACKED = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
"""Formats of compressed-tensors."""
_WIDE = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The layout of a checkpoint's weights, one of `_METHODS`, and its settings."""

    method: str
    settings: Mapping[str, Any]
    is_stated: bool
    """By config.json; a file beside it can be left from an older state of the folder."""

    @property
    def identity(self) -> str:
        """All that the widened weights depend on besides the files."""
        return f"{self.method} {json.dumps(self.settings, sort_keys=True)}"

    def of_weight(self, stem: str) -> dict[str, Any]:
        """Return the settings, with those of one weight or of the first group of weights that has blocks."""
        groups = self.settings.get("config_groups") or {}
        of_groups = [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
        own = self.settings.get(stem)
        return {
            **self.settings,
            "block_structure": next((block for block in of_groups if block), None),
            **(own if isinstance(own, Mapping) else {}),
        }


def quantisation_of(folder: Path) -> Quantisation | None:
    """Return how a checkpoint is quantised, from its JSON files alone; None: it is not.

    Raises:
        UnsupportedModelError: its layout, or a feature of it, is not read; the text names it.
        ModelNotFoundError, ModelError: see `read_json`.
    """
    settings, is_stated = _stated(read_json(folder, "config.json")), True
    if settings is None:
        name = next((name for name in _SIDE_FILES if (folder / name).is_file()), None)
        if name is None:
            return None
        settings, is_stated = _SIDE_FILES[name](read_json(folder, name)), False
    method = str(settings.get("quant_method")).lower()
    if method not in _METHODS:
        _refuse(folder, f"the layout {method!r} of quantised weights is not read")
    reason = _unread_feature(method, settings)
    if reason:
        _refuse(folder, reason)
    return Quantisation(method, settings, is_stated)


def _stated(config: Mapping[str, Any]) -> dict[str, Any] | None:
    text = config.get("text_config") or {}
    found = config.get("quantization_config") or config.get("compression_config") or text.get("quantization_config")
    if not found and not config.get("quantization"):
        return None
    settings = dict(found or config["quantization"])
    if "quant_method" not in settings:
        if config.get("quantization"):
            return {"quant_method": "mlx", **settings}
        if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
            return {"quant_method": "bitsandbytes", **settings}
    return settings


def _unread_feature(method: str, settings: Mapping[str, Any]) -> str:
    """Return what about the layout is not read; empty: nothing."""
    checks = {
        "gptq": _unread_gptq,
        "awq": _unread_awq,
        "compressed-tensors": _unread_compressed,
        "modelopt": _unread_modelopt,
        "mlx": _unread_mlx,
    }
    return checks[method](settings) if method in checks else ""


def _unread_gptq(settings: Mapping[str, Any]) -> str:
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        return (
            f"GPTQ weights in the form {form if form != 'gptq' else 'marlin'!r} are not read, only 'gptq' and 'gptq_v2'"
        )
    if settings.get("bits", 4) not in (2, 4, 8):
        return f"GPTQ weights of {settings['bits']} bits are not read, only those of 2, 4 and 8"
    return ""


def _unread_awq(settings: Mapping[str, Any]) -> str:
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", 4)
    if version != "gemm" or bits != 4:
        return f"AWQ weights of version {version!r} and {bits} bits are not read, only version 'gemm' of 4 bits"
    return ""


def _unread_compressed(settings: Mapping[str, Any]) -> str:
    groups = (settings.get("config_groups") or {}).values()
    overall = settings.get("format")
    forms = {group.get("format") or overall for group in groups} or {overall}
    unknown = sorted(str(form) for form in forms if form not in _PACKED)
    if unknown:
        return f"compressed-tensors weights in the format {unknown[0]!r} are not read, only {', '.join(_PACKED)}"
    bits = {int((group.get("weights") or {}).get("num_bits") or 4) for group in groups}
    if not bits <= {2, 4, 8}:
        return f"compressed-tensors weights of {min(bits - {2, 4, 8})} bits are not read, only those of 2, 4 and 8"
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        return f"compressed-tensors weights of sparsity {sparsity!r} are not read"
    if (settings.get("transform_config") or {}).get("config_groups"):
        return "compressed-tensors weights with transforms of their inputs (transform_config) are not read"
    return ""


def _unread_modelopt(settings: Mapping[str, Any]) -> str:
    algorithm = str(settings.get("quant_algo"))
    return "" if algorithm in ("FP8", "NVFP4") else f"ModelOpt weights of {algorithm} are not read, only FP8 and NVFP4"


def _unread_mlx(settings: Mapping[str, Any]) -> str:
    mode = settings.get("mode", "affine")
    return "" if mode == "affine" else f"MLX weights of mode {mode!r} are not read, only 'affine'"


def _refuse(folder: Path, reason: str) -> None:
    raise UnsupportedModelError(f"{folder}: {reason}. {_REMEDY}")


def open_weights(folder: Path) -> "WeightFiles | WidenedFiles":
    """Open the weights of a checkpoint, quantised or not.

    Raises:
        UnsupportedModelError: see `quantisation_of`; or a tensor is quantised, but nothing says how.
        ModelNotFoundError, ModelError: a file is missing or damaged, or config.json names a layout that no weight has.
    """
    quantisation, files = quantisation_of(folder), WeightFiles(folder)
    widened = None if quantisation is None else WidenedFiles(files, quantisation)
    if widened is not None and not widened.stems:
        assert quantisation is not None
        if quantisation.is_stated:
            raise ModelError(
                f"{folder}: config.json says that weights are quantised ({quantisation.method}), but none is. If they "
                "were widened, remove quantization_config from config.json; else download the checkpoint again"
            )
        widened = None
    plain = list(files) if widened is None else widened.plain
    for name, dtype in files.dtypes(one for one in plain if one.endswith(("weight", "weight_packed"))):
        if dtype not in _WIDE:
            _refuse(folder, f"{name} is quantised ({dtype}), and nothing in the folder says how")
    return files if widened is None else widened


class WidenedFiles:
    """The weights of a quantised checkpoint under the names and in the shapes that they had before; see `WeightFiles`.

    Widened weights are float32 copies; nothing of them is kept here.
    """

    def __init__(self, files: WeightFiles, quantisation: Quantisation) -> None:
        """
        Raises:
            UnsupportedModelError: a quantised weight has tensors that its layout does not explain.
        """
        from stillroom.models.quantised_formats import LAYOUTS

        self._files, self._quantisation = files, quantisation
        self._layout = LAYOUTS[quantisation.method]
        self.folder = files.folder
        self.stems = _quantised(files, self._layout)
        """Ends of the names of each quantised weight's parts, by the beginning that they share."""
        parts = {stem + end for stem, ends in self.stems.items() for end in ends}
        self.plain = [name for name in files if name not in parts and not name.endswith(self._layout.unused or ("\0",))]
        """Names of the tensors that are not quantised."""
        for name in self.plain:
            if name.rpartition(".")[0] in self.stems and not name.endswith(".bias"):
                _refuse(self.folder, f"{self._layout.name} weights with {name} are not read")
        self._stem_of = {stem + self._layout.target: stem for stem in self.stems}

    def __contains__(self, name: str) -> bool:
        return name in self._stem_of or name in self._files

    def __iter__(self) -> Iterator[str]:
        yield from self.plain
        yield from self._stem_of

    def is_mapped(self, name: str) -> bool:
        """See `WeightFiles`."""
        return name not in self._stem_of

    def get(self, name: str, *, is_passing: bool = False) -> "torch.Tensor":
        """See `WeightFiles`.

        Raises:
            ModelError: also if the parts of a weight do not fit together.
        """
        stem = self._stem_of.get(name)
        if stem is None:
            return self._files.get(name, is_passing=is_passing)
        parts = {end: self._files.get(stem + end, is_passing=True) for end in self.stems[stem]}
        try:
            return self._layout.widen(parts, self._quantisation.of_weight(stem)).contiguous()
        except (ValueError, LookupError, RuntimeError, TypeError) as error:
            raise ModelError(
                f"{self.folder}: the parts of {name} do not fit the layout {self._layout.name} "
                f"({type(error).__name__}: {str(error).splitlines()[0]}); download the checkpoint again"
            ) from error

    def unmap(self) -> None:
        """See `WeightFiles`."""
        self._files.unmap()


def _quantised(files: WeightFiles, layout: "Layout") -> dict[str, list[str]]:
    """Return the ends of the names of each quantised weight's parts by the weight's stem."""
    ends_of: dict[str, list[str]] = {}
    by_length = sorted(layout.parts, key=len, reverse=True)
    for name in files:
        end = next((end for end in by_length if name.endswith(end)), None)
        if end is not None:
            ends_of.setdefault(name.removesuffix(end), []).append(end)
    found = {stem: ends for stem, ends in ends_of.items() if ends != [layout.target]}
    for stem, ends in found.items():
        if not any(end in layout.codes for end in ends):
            _refuse(files.folder, f"{layout.name} weights with {stem}{ends[0]} and without codes are not read")
    return found
