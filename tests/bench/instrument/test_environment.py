"""What a report says about the machine."""

from pathlib import Path

import pytest

from stillroom_bench.instrument.environment import _processor


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags : fpu avx2 avx512f amx_tile", "Xeon (AMX)"),
        ("flags : fpu avx2 avx512f", "Xeon (AVX-512)"),
        ("flags : fpu avx2", "Xeon (AVX2)"),
        ("Features : fp asimd", "Xeon (NEON)"),
        ("flags : fpu", "Xeon"),
    ],
)
def test_processor_is_named_with_its_widest_instructions(flags: str, expected: str, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nmodel name : Xeon\n{flags}\n\nprocessor : 1\nmodel name : Xeon\n{flags}\n")

    assert _processor(info) == expected
    assert _processor(tmp_path / "missing")
