"""Fixtures of all tests. Tests run offline, whatever the environment says."""

import asyncio
import functools
import gc
import importlib.util
import os
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn.server
from hypothesis import HealthCheck, settings

from stillroom.backends import engine_building
from stillroom.backends.calibration import CalibrationTarget, quick_profile
from stillroom.core.clock import SystemClock
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.models import bundled_models
from stillroom.ops import crossovers
from stillroom.retrieval import text_encoders
from stillroom.retrieval.model_files import PACKAGED_MODEL, ModelFiles, locate_model
from tests import distribution
from tests.distribution import pytest_xdist_make_scheduler  # noqa: F401  a hook of pytest-xdist

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before any test can

# a busy machine must not fail a test
settings.register_profile("stillroom", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("stillroom"), max_examples=30)  # `make test`
settings.load_profile("stillroom")

SHARED = Path(__file__).resolve().parents[2] / "shared"


def chromium() -> str | None:
    """Return the path of Chromium, if it and playwright are installed."""
    if importlib.util.find_spec("playwright") is None:
        return None
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose shared data, GPU or browser is missing, and begin with the long ones."""
    distribution.order(items)
    skips = {
        "shared": None if SHARED.is_dir() else pytest.mark.skip(reason="needs ../shared"),
        "gpu": None if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA device"),
        "browser": None if chromium() else pytest.mark.skip(reason="needs Chromium and playwright"),
    }
    for item in items:
        for marker, skip in skips.items():
            if skip is not None and item.get_closest_marker(marker):
                item.add_marker(skip)


class ShortPauses:
    """The module `asyncio`, whose `sleep` takes 5 ms at most."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))


@pytest.fixture(scope="session", autouse=True)
def servers_stop_at_once() -> Iterator[None]:
    """Uvicorn looks every 0.1 s whether it should stop, then waits 0.1 s; hundreds of tests start a server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", ShortPauses())
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """httpx reads the authorities' certificates for each client, in 20 ms; hundreds of tests make some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def libraries_are_no_garbage() -> None:
    """Collections of garbage skip the half million objects of imported modules, and are fewer: of the CPU time of
    property tests they were a tenth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests, and processes that they start, neither read nor change what the user's other processes have measured. What
    one of them measures, the others of this run need not measure again."""
    folder, add = tmp_path_factory.getbasetemp(), crossovers._add
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # that of all workers

    def add_for_all(name: str, value: float) -> None:
        for _ in range(crossovers._NUM_MEASUREMENTS):
            add(name, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(crossovers, "_add", add_for_all)
        crossovers._file()  # it is found once, and tests change the variable
        yield


@pytest.fixture(scope="session", autouse=True)
def packaged_embedder_is_read_once() -> Iterator[None]:
    """An embedder reads its weights in 0.1 s, and hundreds of tests have one. Tests share the packaged model's weights,
    as the tenants of a server do."""
    load, packaged = text_encoders.load_text_encoder, locate_model(PACKAGED_MODEL)
    known: list[text_encoders.TextEncoder] = []

    def load_once(files: ModelFiles) -> text_encoders.TextEncoder:
        if files.folder != packaged:
            return load(files)
        if not known:
            known.append(load(files))
        return known[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_encoders, "load_text_encoder", load_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def costs_are_measured_once() -> Iterator[None]:
    """An engine measures for 0.1 s what its model costs if there is no calibration; hundreds of tests make one. A model
    of the same shape has the costs that were measured first."""
    known: dict[str, CostProfile] = {}

    def measured_once(target: CalibrationTarget, folder: Path | None) -> CostProfile:
        if not isinstance(target.clock, SystemClock):
            return quick_profile(target, folder)
        model, limits = target.runner.decoder, (target.num_slots, target.max_model_len, target.step_tokens)
        what = repr((type(model), model.spec, model.dtype, model.device, limits, folder is None))
        if what not in known:
            known[what] = quick_profile(target, folder)
        return known[what]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_building, "quick_profile", measured_once)
        yield


@pytest.fixture(scope="module", autouse=True)
def default_model(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the bundled decoder the default in modules with the marker `microworld`, which test its tokens and its KV.
    Automatic, so that it comes before all fixtures of the module."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("microworld") is None:
            yield
            return
        patch.setattr(bundled_models, "DEFAULT", "microworld")
        patch.setenv("STILLROOM_RUNTIME__MODEL", bundled_models.MICROWORLD)  # of commands in their own process
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread of torch: with a tiny model two threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of real data and models next to the checkout; its tests have the marker `shared`."""
    return SHARED
