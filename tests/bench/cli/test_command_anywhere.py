"""`stillroom bench anywhere`: which peers it takes."""

from tests.cli.harness import Run


def test_wrong_peers(run: Run) -> None:
    for flags, words in (
        (["--peer", "nobody=py"], "unknown peer nobody; known are kvboost"),
        (["--peer", "kvboost"], "--peer kvboost=PATH"),
        (["--peer", "kvboost=py"], "--chunk-tokens must be a multiple of 32"),
    ):
        result = run("bench", "anywhere", "--work-dir", "w", *flags)
        assert result.code == 2 and words in result.err
