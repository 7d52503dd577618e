"""A vocabulary that is read without weights is that of the loaded model."""

import shutil
from pathlib import Path

import pytest

from stillroom.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from stillroom.models.bundled_models import MICROWORLD, READER
from stillroom.models.loader import load_model
from stillroom.models.vocabulary import load_vocabulary
from tests.fakes import byte_tokenizer, random_checkpoint
from tests.models.test_checkpoint import edit

TEXT = "<s>Straße, 東京 and\n`code`"


def check_equal(model: str, without_weights: str) -> None:
    """Check that the loaded model has the vocabulary that is read from a folder without weights."""
    loaded, found = load_model(model), load_vocabulary(without_weights)
    assert found.name == loaded.name
    assert found.stop_token_ids == loaded.stop_token_ids
    assert found.size == loaded.decoder.spec.vocab_size
    for text in (TEXT, "Who is the mayor of Ostwick ?"):
        assert found.tokenizer.encode_text(text) == loaded.tokenizer.encode_text(text)
        assert found.tokenizer.encode_template(text) == loaded.tokenizer.encode_template(text)


def test_bundled_model_has_its_vocabulary() -> None:
    check_equal(MICROWORLD, MICROWORLD)
    assert load_vocabulary(MICROWORLD).knows_all_tokens


def test_folder_needs_no_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_checkpoint(folder, "Llama", num_hidden_layers=1, eos_token_id=[1, 7])
    byte_tokenizer().save_pretrained(folder)
    bare = tmp_path / "bare" / "model"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    check_equal(str(folder), str(bare))
    edit(bare, vocab_size=5)
    assert not load_vocabulary(str(bare)).knows_all_tokens


@pytest.mark.parametrize("size", [0, "many", 2.5])
def test_wrong_size_is_refused(tmp_path: Path, size: object) -> None:
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=1)
    byte_tokenizer().save_pretrained(tmp_path)
    edit(tmp_path, vocab_size=size)
    with pytest.raises(ModelError, match="vocab_size"):
        load_vocabulary(str(tmp_path))


def test_models_without_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="quotes documents"):
        load_vocabulary(READER)
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load_vocabulary(str(tmp_path))
