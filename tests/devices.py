"""The device of the engine's and the decoder's tests; `make gpu-check` runs them on a GPU."""

import os

TEST_DEVICE = os.environ.get("STILLROOM_TEST_DEVICE", "cpu")
