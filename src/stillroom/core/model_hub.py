"""Says why the model hub did not deliver a model, and what to do about it."""

import os

_OFF = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Environment variables that forbid the hub's client to use the network."""
_TRUE = ("1", "ON", "YES", "TRUE")


def network_advice(otherwise: str = "check the name and the network") -> str:
    """Return what to do after a failed download: unset the variable that forbids the network, or `otherwise`."""
    name = next((name for name in _OFF if os.environ.get(name, "").upper() in _TRUE), None)
    return otherwise if name is None else f"{name}={os.environ[name]} forbids the network: unset it"
