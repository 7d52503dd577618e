"""Finds a checkpoint's folder and reads its JSON files and safetensors weights."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import SafetensorError, safe_open

from stillroom.core.model_hub import network_advice
from stillroom.errors import ModelError, ModelNotFoundError, StillroomError, UnsupportedModelError
from stillroom.models import gguf_file
from stillroom.models.bundled_models import MICROWORLD, bundled_folder, full_name, reader_folder

if TYPE_CHECKING:  # finding a tokenizer needs no tensors
    import torch

_HUB_TEXTS = ["*.json", "*.jinja", "tokenizer.model"]
_HUB_PATTERNS = [*_HUB_TEXTS, "*.safetensors"]


def resolve(model: str, check: Callable[[Path], object] | None = None, *, needs_weights: bool = True) -> Path:
    """Return the folder of a bundled model, a local folder, a GGUF file (converted once) or a hub model (loaded once).

    Args:
        check: called with a folder that has the JSON files of a hub model, before its weights are loaded; raises an
            error if they are not wanted.
        needs_weights: False neither converts nor loads weights; the folder may have them all the same.

    Raises:
        ModelNotFoundError: there is no such folder, and the hub does not have the name or cannot be reached.
        UnsupportedModelError: it is a reader, which is no checkpoint of a decoder.
        UnsupportedModelError, ModelError, ConfigError: see `gguf_file.converted`.
    """
    if reader_folder(model) is not None:
        raise UnsupportedModelError(
            f"{full_name(model)} quotes documents; it generates no tokens and has no KV. Give a model that generates: "
            f"--model (runtime.model) with a checkpoint's folder, a hub name, or {MICROWORLD} for a demonstration"
        )
    bundled = bundled_folder(model)
    if bundled is not None:
        return bundled
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix == gguf_file.SUFFIX:
        if not folder.is_file():
            raise ModelNotFoundError(f"there is no file {model}")
        return gguf_file.converted(folder, needs_weights=needs_weights)
    _check_hub_name(model)
    from huggingface_hub import snapshot_download

    try:
        if check is not None:
            check(Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS[:1])))
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS if needs_weights else _HUB_TEXTS))
    except StillroomError:
        raise
    except Exception as error:  # the hub client raises exceptions of many classes
        raise ModelNotFoundError(
            f"no folder {model!r} here, and the model hub did not deliver it ({type(error).__name__}); "
            f"{network_advice()}, or give the folder of a downloaded checkpoint"
        ) from error


def _check_hub_name(model: str) -> None:
    """Raise ModelNotFoundError for what can only mean a folder or a file."""
    path = Path(model).expanduser()
    if path.is_file():
        raise ModelNotFoundError(f"{model} is a file; name its folder, {path.parent}, if that is a checkpoint's")
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelNotFoundError(
            f"{model} is not a folder; give a checkpoint's folder, a GGUF file, a hub name or 'bundled'"
        )


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read one of the checkpoint's JSON files.

    Raises:
        ModelNotFoundError: the file is missing.
        ModelError: the file is not a JSON object.
    """
    path = folder / name
    if not path.is_file():
        files = sorted(folder.glob(f"*{gguf_file.SUFFIX}"))
        remedy = f"give the file: --model {files[0]}" if files else "is it the folder of a Hugging Face checkpoint?"
        raise ModelNotFoundError(f"{folder} has no {name}; {remedy}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the checkpoint again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object; download the checkpoint again")
    return content


class WeightFiles:
    """Tensors of a checkpoint by name, from `model.safetensors` or its shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = self._find()
        self._kept: dict[str, Any] = {}
        self._passing: dict[str, Any] = {}

    def _find(self) -> dict[str, str]:
        if (self.folder / "model.safetensors.index.json").is_file():
            weight_map = read_json(self.folder, "model.safetensors.index.json").get("weight_map", {})
            return {str(name): str(file) for name, file in weight_map.items()}
        if not (self.folder / "model.safetensors").is_file():
            if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.gguf")):
                raise UnsupportedModelError(
                    f"{self.folder} has no safetensors weights; convert the checkpoint, or name the GGUF file itself"
                )
            raise ModelNotFoundError(f"{self.folder} has no model.safetensors")
        with self._reading("model.safetensors") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")

    def _reading(self, file: str) -> Any:
        path = self.folder / file
        if not path.is_file():
            raise ModelNotFoundError(f"{self.folder} lacks {file}, which its index names; download it again")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged ({error}); download it again") from None

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def dtypes(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield each name and its dtype as safetensors writes it, such as `BF16`; reads no weights."""
        of_file: dict[str, list[str]] = {}
        for name in names:
            of_file.setdefault(self._file_of[name], []).append(name)
        for file, found in of_file.items():
            with self._reading(file) as opened:
                present = set(opened.keys())
                for name in found:
                    if name in present:  # a name that is missing is an error when it is read
                        yield name, str(opened.get_slice(name).get_dtype())

    def is_mapped(self, name: str) -> bool:
        """Whether `get` returns memory of the file."""
        return name in self

    def digests(self) -> list[str]:
        """Return name and xxh3 hash of each file, in order of names. The hash does not resist forgery.

        Raises:
            ModelError: a file cannot be read.
        """
        found = []
        for name in sorted(set(self._file_of.values())):
            hasher = xxhash.xxh3_128()
            try:
                with (self.folder / name).open("rb") as file:
                    while part := file.read(2**22):
                        hasher.update(part)
            except OSError as error:
                raise ModelError(f"{self.folder / name} cannot be read: {error}") from error
            found.append(f"{name}:{hasher.hexdigest()}")
        return found

    def get(self, name: str, *, is_passing: bool = False) -> "torch.Tensor":
        """Return a tensor in the checkpoint's dtype on the CPU, memory-mapped from its file.

        Args:
            is_passing: the caller keeps only a copy; `unmap` unmaps the file's pages.

        Raises:
            ModelError: the checkpoint has no tensor of that name, or its file is damaged.
        """
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"{self.folder} has no tensor {name}; the weights do not match config.json")
        mapped = self._passing if is_passing else self._kept
        if file not in mapped:
            mapped[file] = self._reading(file)
        try:
            tensor: torch.Tensor = mapped[file].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self.folder / file}: {error}; download it again") from None
        return tensor

    def unmap(self) -> None:
        """Unmap the files of passing tensors, as soon as none of these tensors is alive."""
        self._passing.clear()
