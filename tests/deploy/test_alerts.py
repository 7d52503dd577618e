"""The alerts against a server's series: promtool tells which alerts fire, and when."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alerts.yml"
VERIFY = 'stillroom_kv_cache_verify_failures_total{reason="checksum",tier="disk"}'
CHATS = 'stillroom_http_requests_total{path="/v1/chat/completions",status="%s"}'

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def firing(tmp_path: Path, series: dict[str, str], at: str, alert: str) -> bool:
    """Whether the alert fires at this time. Series in promtool's notation, one value per minute; `_` is no value."""

    def passes(labels: list[dict[str, dict[str, str]]]) -> subprocess.CompletedProcess[str]:
        test = {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": labels}],
        }
        path = tmp_path / "alarm.yml"
        path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
        return subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)

    silent = passes([])
    assert silent.returncode == 0 or "got:" in silent.stdout + silent.stderr, silent.stdout + silent.stderr
    return silent.returncode != 0


def test_damage_found_at_start_fires_for_an_hour(tmp_path: Path) -> None:
    found = {VERIFY: "_x5 385x200"}
    assert firing(tmp_path, found, "10m", "StillroomDamagedRecords")
    assert not firing(tmp_path, found, "90m", "StillroomDamagedRecords")


@pytest.mark.parametrize("minutes_down", [3, 90])
def test_damage_found_by_a_restart_fires(tmp_path: Path, minutes_down: int) -> None:
    found = {VERIFY: f"0x100 _x{minutes_down} 385x100"}
    assert firing(tmp_path, found, f"{100 + minutes_down + 5}m", "StillroomDamagedRecords")


def test_damage_found_later_fires_above_a_threshold(tmp_path: Path) -> None:
    assert firing(tmp_path, {VERIFY: "0x90 20x20"}, "95m", "StillroomDamagedRecords")
    assert not firing(tmp_path, {VERIFY: "0x90 2x20"}, "95m", "StillroomDamagedRecords")


def test_first_burst_of_internal_errors_fires_and_resolves(tmp_path: Path) -> None:
    for name in (CHATS % 500, 'stillroom_requests_total{outcome="failed"}'):
        burst = {name: "0x10 6x60"}
        assert not firing(tmp_path, burst, "9m", "StillroomFails")
        assert firing(tmp_path, burst, "12m", "StillroomFails")
        assert not firing(tmp_path, burst, "30m", "StillroomFails")


def test_database_that_does_not_answer_fires_and_resolves(tmp_path: Path) -> None:
    for series in (
        {"stillroom_database_up": "1x10 0x10 1x60"},
        {"stillroom_database_copy_age_seconds": "1x10 90x10 1x60"},
    ):
        assert not firing(tmp_path, series, "9m", "StillroomDatabaseAway")
        assert firing(tmp_path, series, "15m", "StillroomDatabaseAway")
        assert not firing(tmp_path, series, "30m", "StillroomDatabaseAway")


def test_lost_device_fires_and_resolves(tmp_path: Path) -> None:
    losses = {"stillroom_device_losses_total": "0x10 1x60"}
    assert not firing(tmp_path, losses, "9m", "StillroomDeviceLost")
    assert firing(tmp_path, losses, "12m", "StillroomDeviceLost")
    assert not firing(tmp_path, losses, "30m", "StillroomDeviceLost")


def test_server_whose_requests_all_time_out_fires(tmp_path: Path) -> None:
    probes = {'stillroom_http_requests_total{path="/metrics",status="200"}': "0+6x60"}
    assert firing(tmp_path, probes | {CHATS % 504: "0+1x60"}, "30m", "StillroomTooLate")
    assert not firing(tmp_path, probes | {CHATS % 504: "0x60", CHATS % 200: "0+1x60"}, "30m", "StillroomTooLate")
    assert not firing(tmp_path, probes, "30m", "StillroomTooLate")
