"""Tests training, resuming and export."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stillroom.models.checkpoint import resolve
from stillroom.models.tokenizer import Tokenizer
from tests.engine.harness import Run as EngineRun
from tests.engine.harness import engine_on, request
from training.checkpoint import CHECKPOINT, ResumeError, load_checkpoint, read_log
from training.data.collection import Library
from training.data.rows import Batch, Batches, Renderer
from training.data.shards import digest
from training.data.tasks import Mixture
from training.export import export_model, export_run
from training.isolation import dense_mask
from training.losses import num_targets, part_of, score, summed_losses
from training.model import Llama
from training.recipe import RECIPES, Recipe, Shape, learning_rate, text_weight
from training.trainer import Run, Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = Shape(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, vocab_size=600)
RECIPE = Recipe(
    shape=SHAPE,
    num_steps=6,
    num_rows=2,
    row_tokens=320,
    learning_rate=5e-3,
    warmup_steps=2,
    mixture=Mixture(max_chunks=2, max_questions=3, ramp=0.5),
)
QUICK = Run(log_every=1, score_every=100, num_held=1)


def state_of(folder: Path) -> dict[str, Any]:
    state = load_checkpoint(folder)
    assert state is not None
    return state


def assert_same_state(one: Any, two: Any) -> None:
    """Assert that two nested lists and dictionaries are equal bit for bit."""
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_same_state(one[key], two[key])
    elif isinstance(one, list):
        for left, right in zip(one, two, strict=True):
            assert_same_state(left, right)
    else:
        assert one == two


@pytest.mark.slow
def test_resumed_run_is_bit_identical(small_data: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    outcome = Trainer(RECIPE, QUICK, small_data, whole).train()
    assert outcome.is_done and outcome.step == 6 and outcome.scores

    assert not Trainer(RECIPE, replace(QUICK, stop_step=3), small_data, parts).train().is_done
    trainer = Trainer(RECIPE, QUICK, small_data, parts)
    again = trainer.train(lambda line: trainer.stop() if line["step"] == 4 else None)  # as Ctrl-C does
    assert again.step == 4 and not again.scores
    last = Trainer(RECIPE, QUICK, small_data, parts).train()
    assert last == outcome

    one, two = state_of(whole), state_of(parts)
    for state in (one, two):
        state.pop("seconds")
    assert_same_state(one, two)
    timed = ("tokens/s", "minutes left", "environment")
    logs = [
        [{k: v for k, v in line.items() if k not in timed} for line in read_log(folder)] for folder in (whole, parts)
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 8


def test_log_lines_after_the_checkpoint_are_dropped_on_resume(small_data: Path, tmp_path: Path) -> None:
    Trainer(RECIPE, replace(QUICK, stop_step=2), small_data, tmp_path).train()
    kept = (tmp_path / CHECKPOINT).read_bytes()
    Trainer(RECIPE, replace(QUICK, stop_step=4), small_data, tmp_path).train()
    (tmp_path / CHECKPOINT).write_bytes(kept)  # as if it had been killed before its next checkpoint
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 5, "answ')
    assert Trainer(RECIPE, QUICK, small_data, tmp_path).train().is_done
    assert [line["step"] for line in read_log(tmp_path) if "answer loss" in line] == [1, 2, 3, 4, 5, 6]


def test_resuming_with_another_recipe_or_data_is_refused(small_data: Path, tmp_path: Path) -> None:
    Trainer(RECIPE, replace(QUICK, stop_step=1), small_data, tmp_path / "run").train()
    with pytest.raises(ResumeError, match="the recipe differs"):
        Trainer(replace(RECIPE, learning_rate=1e-3), QUICK, small_data, tmp_path / "run")
    with pytest.raises(ResumeError, match="the recipe differs"):
        export_run(tmp_path / "run", small_data, tmp_path / "model", replace(RECIPE, learning_rate=1e-3))

    data = tmp_path / "data"
    shutil.copytree(small_data, data)
    shard = data / "train-worlds-0000.jsonl.gz"
    shutil.copy(data / "eval-worlds-0000.jsonl.gz", shard)
    with pytest.raises(ValueError, match="differ from its manifest"):
        Trainer(RECIPE, QUICK, data, tmp_path / "new")
    (data / "manifest.json").write_text(json.dumps({"digest": digest(data)}))
    with pytest.raises(ResumeError, match="the data differs"):
        Trainer(RECIPE, QUICK, data, tmp_path / "run")
    with pytest.raises(ResumeError, match="the data differs"):
        export_run(tmp_path / "run", data, tmp_path / "model", RECIPE)


def test_run_stops_after_its_minutes(small_data: Path, tmp_path: Path) -> None:
    times = iter(range(0, 6000, 30))
    run = replace(QUICK, minutes=1.0, clock=lambda: float(next(times)))
    assert 0 < Trainer(RECIPE, run, small_data, tmp_path).train().step < 6


def test_worker_processes_make_the_same_batches(small_data: Path, tmp_path: Path) -> None:
    Trainer(RECIPE, replace(QUICK, stop_step=2), small_data, tmp_path / "a").train()
    Trainer(RECIPE, replace(QUICK, stop_step=2, num_workers=2), small_data, tmp_path / "b").train()
    Trainer(RECIPE, replace(QUICK, stop_step=2, micro_rows=1), small_data, tmp_path / "c").train()
    one, same, two = (state_of(tmp_path / name)["model"] for name in "abc")
    assert_same_state(one, same)
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one), "rows one by one: the same sums"


def held_batches(data: Path, number: int) -> list[Batch]:
    batches = Batches(
        library=Library.read(data, "train"),
        renderer=Renderer(Tokenizer.load(data / "tokenizer")),
        mixture=Mixture(max_chunks=2, max_questions=3, ramp=0.0),
        num_rows=2,
        row_tokens=320,
        num_steps=1,
        seed=9,
    )
    return [batches.batch(place) for place in range(number)]


def test_model_memorises_a_batch(small_data: Path) -> None:
    model, (batch,) = Llama(SHAPE, 0), held_batches(small_data, 1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    device, counts = torch.device("cpu"), num_targets(batch)
    before = score(model, [batch], device, dtype=torch.float32)
    for _ in range(60):
        part = part_of(batch, slice(0, 2), device, is_flex=False)
        answer, text = summed_losses(model, model(part.tokens, part.positions, part.isolation), part)
        torch.autograd.backward(answer / counts[0] + text / counts[1])
        optimiser.step()
        optimiser.zero_grad()
    after = score(model, [batch], device, dtype=torch.float32)
    assert before.exact == 0.0 and before.answer_loss > 5
    assert after.exact > 0.8 and after.answer_loss < 0.5


def test_branch_does_not_attend_to_other_branches(small_data: Path) -> None:
    """Logits in a packed row equal those of the context with the branch alone."""
    model, (batch,) = Llama(SHAPE, 1).eval(), held_batches(small_data, 1)
    part = part_of(batch, slice(0, 1), torch.device("cpu"), is_flex=False)
    with torch.no_grad():
        packed = model.logits(model(part.tokens, part.positions, part.isolation))[0]
        sample = int(batch.samples[0][batch.is_answer[0]][0])
        for branch in np.unique(batch.branches[0][(batch.samples[0] == sample) & batch.is_answer[0]]):
            chosen = (batch.samples[0] == sample) & np.isin(batch.branches[0], [0, branch])
            ids = torch.from_numpy(batch.tokens[0][chosen]).long()[None]
            zeros = torch.zeros_like(ids)
            alone = model.logits(model(ids, torch.arange(ids.shape[1])[None], dense_mask(zeros, zeros)))[0]
            assert torch.allclose(alone, packed[torch.from_numpy(chosen)], atol=1e-4)


def test_schedules_begin_and_end_at_the_expected_rates() -> None:
    for schedule, last in (("wsd", 0.0), ("cosine", 0.1)):
        recipe = replace(RECIPE, num_steps=1000, warmup_steps=10, schedule=schedule, learning_rate=1.0)  # type: ignore[arg-type]
        rates = [learning_rate(recipe, step) for step in range(1000)]
        assert rates[0] == pytest.approx(0.1, rel=0.05) and max(rates) == pytest.approx(1.0, rel=0.01)
        assert rates[-1] == pytest.approx(last, abs=0.01)
        assert all(one >= two for one, two in zip(rates[20:], rates[21:], strict=False))
    assert text_weight(RECIPE, 0) == 1.0 and text_weight(RECIPE, 5) == pytest.approx(0.1)


def test_shipped_shapes_fit_the_package() -> None:
    sizes = {name: recipe.shape.num_parameters for name, recipe in RECIPES.items()}
    assert 11e6 < sizes["12m"] < 13e6 and 28e6 < sizes["30m"] < 32e6
    assert 2 * sizes["30m"] < 64 * 2**20
    model = Llama(SHAPE, 0)
    assert sum(one.numel() for one in model.parameters()) == SHAPE.num_parameters


@pytest.fixture(scope="module")
def exported(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a float32 model with a wide spread of logits, so that greedy choices are clear."""
    model = Llama(SHAPE, 3)
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.add_(torch.randn(one.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return export_model(model, small_data, tmp_path_factory.mktemp("model"), torch.float32)


def test_training_transformers_and_stillroom_compute_the_same_logits(exported: Path, small_data: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = Llama(SHAPE, 0)
    weights = load_file(exported / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): one for name, one in weights.items()})
    oracle = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    chat = AutoTokenizer.from_pretrained(exported)
    text = chat.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    tokenizer = Tokenizer.load(exported)
    ids = tokenizer.encode_template(text) + tokenizer.encode_text("The harbour of Elton was enlarged in 1700.")
    tokens = torch.tensor([ids])
    zeros = torch.zeros_like(tokens)
    with torch.no_grad():
        ours = model.logits(model(tokens, torch.arange(len(ids))[None], dense_mask(zeros, zeros)))
        theirs = oracle(tokens).logits
        assert (ours - theirs).abs().max() < 1e-4
        greedy = oracle.generate(tokens, do_sample=False, max_new_tokens=24, eos_token_id=None)[0, len(ids) :].tolist()
    run = EngineRun(engine_on(exported))
    run.submit(request("a", [ids[:7], ids[7:]], max_tokens=24))
    run.finish()
    assert list(run.tokens["a"]) == greedy


def test_exported_folder_is_a_complete_checkpoint(small_data: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "model"
    with pytest.raises(FileNotFoundError, match="train first"):
        export_run(run, small_data, out, RECIPE)
    Trainer(RECIPE, replace(QUICK, stop_step=1), small_data, run).train()
    export_run(run, small_data, out, RECIPE)
    names = {path.name for path in out.iterdir()}
    assert names >= {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "ATTRIBUTION.md"}
    assert resolve(str(out)) == out
    assert (out / "model.safetensors").stat().st_size < 2.2 * SHAPE.num_parameters


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_killed_run_resumes_from_its_checkpoint(small_data: Path, tmp_path: Path, blow: signal.Signals) -> None:
    program = (
        "import sys, pathlib, tests.training.test_trainer as t, torch; from dataclasses import replace;"
        "torch.set_num_threads(1); data, out = map(pathlib.Path, sys.argv[1:]);"
        "run = replace(t.QUICK, checkpoint_minutes=0.0);"
        "t.Trainer(t.RECIPE, run, data, out).train(lambda line: print(line['step'], flush=True))"
    )
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    out = tmp_path / "killed"
    command = [sys.executable, "-c", program, str(small_data), str(out)]
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "3":
            assert process.poll() is None
        process.send_signal(blow)
        process.wait()
    assert 2 <= state_of(out)["step"] < 6
    Trainer(RECIPE, QUICK, small_data, out).train()
    Trainer(RECIPE, QUICK, small_data, tmp_path / "whole").train()
    assert_same_state(state_of(out)["model"], state_of(tmp_path / "whole")["model"])
