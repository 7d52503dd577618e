"""Tests the command `stillroom bench anywhere`."""

from tests.cli.harness import Run


def test_invalid_peers_are_refused(run: Run) -> None:
    for flags, words in (
        (["--peer", "other=py"], "unknown peer other; known are kvboost"),
        (["--peer", "kvboost"], "--peer kvboost=PATH"),
        (["--peer", "kvboost=py"], "--chunk-tokens must be a multiple of 32"),
    ):
        result = run("bench", "anywhere", "--work-dir", "w", *flags)
        assert result.code == 2 and words in result.err
