"""Discovery of document files in folders."""

import json
from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom.retrieval.intake.discovery import discover
from tests.retrieval.conftest import as_anybody


def fill(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def found(*paths: Path, exclude: tuple[str, ...] = ()) -> list[str]:
    """Return the discovered names relative to the first path."""
    return [path.relative_to(paths[0]).as_posix() for path in discover(paths, exclude).files]


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_folder_walk_is_sorted_and_skips_hidden_and_unknown_files(tmp_path: Path) -> None:
    names = (
        "b.md",
        "a.txt",
        "sub/c.rst",
        "x.bin",
        ".hidden.md",
        "~$report.docx",
        ".git/d.md",
        "LICENSE-APACHE",
        "README",
        "sub/page.HTML",
        "old.doc",
    )
    fill(tmp_path, dict.fromkeys((*names, "sub/app.min.js", "node_modules/x/readme.md"), "text"))
    seen = discover([tmp_path])
    assert found(tmp_path) == ["LICENSE-APACHE", "README", "a.txt", "b.md", "old.doc", "sub/c.rst", "sub/page.HTML"]
    assert seen.folders == (tmp_path,)
    assert (seen.skipped.num_hidden, seen.skipped.num_ignored, seen.skipped.num_other) == (3, 1, 2)
    assert len(seen.skipped.others) == 2 and all(path.is_relative_to(tmp_path) for path in seen.skipped.others)


def test_only_jsonl_files_with_texts_are_documents_in_a_folder(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", {"_id": "a", "text": "x"})
    write_jsonl(tmp_path / "queries.jsonl", {"_id": "q", "text": "a question"})
    write_jsonl(tmp_path / "events.jsonl", {"level": "info"})
    assert found(tmp_path) == ["corpus.jsonl"]
    (tmp_path / "corpus.jsonl").unlink()
    assert found(tmp_path) == ["queries.jsonl"], "questions alone are documents"
    events = tmp_path / "events.jsonl"
    assert discover([tmp_path], known={str(events)}).files[0] == events, "it was indexed before"


def test_ignore_files_follow_the_rules_of_git(tmp_path: Path) -> None:
    fill(
        tmp_path,
        {
            ".gitignore": "build/\n*.log.txt\n/top.md\n!keep.log.txt\n[unclosed\n",
            "sub/.gitignore": "!again.log.txt\nlocal.md\n",
            "sub/.stillroomignore": "private/\n!local.md\n",
            **dict.fromkeys(("build/a.md", "sub/build/b.md", "x.log.txt", "keep.log.txt", "top.md", "sub/top.md"), "t"),
            **dict.fromkeys(("sub/again.log.txt", "sub/local.md", "sub/private/c.md", "private/d.md"), "t"),
        },
    )
    assert found(tmp_path) == ["keep.log.txt", "private/d.md", "sub/again.log.txt", "sub/local.md", "sub/top.md"]


def test_ignore_files_above_the_folder_count_in_a_repository(tmp_path: Path) -> None:
    fill(tmp_path, {".gitignore": "drafts/\n", "docs/a.md": "t", "docs/drafts/b.md": "t"})
    assert found(tmp_path / "docs") == ["a.md", "drafts/b.md"], "outside a repository, ignore files above do not count"
    (tmp_path / ".git").mkdir()
    assert found(tmp_path / "docs") == ["a.md"]


def test_exclude_applies_to_folders_and_named_files(tmp_path: Path) -> None:
    fill(tmp_path, {".gitignore": "!kept.md\n", **dict.fromkeys(("a.md", "kept.md", "old/b.md", "sub/old/c.md"), "t")})
    assert found(tmp_path, exclude=("/old/", "kept.md")) == ["a.md", "sub/old/c.md"]
    assert found(tmp_path, exclude=("*",)) == []
    named = discover([tmp_path / "a.md", tmp_path / "kept.md"], ("k*",))
    assert named.files == (tmp_path / "a.md",) and named.skipped.num_ignored == 1
    with pytest.raises(UsageError, match="not patterns as in"):
        discover([tmp_path], ("!",))


def test_named_file_is_loaded_whatever_its_name(tmp_path: Path) -> None:
    fill(tmp_path, {".gitignore": "*\n", ".hidden.md": "t", "x.bin": "t"})
    assert found(tmp_path, tmp_path / ".hidden.md", tmp_path / "x.bin") == [".hidden.md", "x.bin"]
    assert found(tmp_path, tmp_path / "x.bin", tmp_path / "." / "x.bin") == ["x.bin"]


def test_links_to_folders_are_not_followed_and_links_to_files_are(tmp_path: Path) -> None:
    fill(tmp_path, {"a.md": "t", "sub/b.md": "t"})
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    (tmp_path / "linked.md").symlink_to(tmp_path / "a.md")
    assert found(tmp_path) == ["a.md", "linked.md", "sub/b.md"]


def test_knowledge_base_inside_the_folder_is_skipped(tmp_path: Path) -> None:
    fill(tmp_path, {"a.md": "t", "kb/manifest.json": "{}", "kb/corpus.sqlite3": "", "kb/notes.md": "t"})
    assert found(tmp_path) == ["a.md"]


def test_ignores_answers_for_files_added_earlier(tmp_path: Path) -> None:
    fill(tmp_path, {".gitignore": "drafts/\n", "drafts/deep/a.md": "t", "b.md": "t", "sub/c.md": "t"})
    seen = discover([tmp_path, tmp_path / "drafts" / "deep"])
    assert not seen.ignores(str(tmp_path / "drafts/deep/a.md")), "its folder was named too"
    seen = discover([tmp_path])
    assert seen.ignores(str(tmp_path / "drafts/deep/a.md")) and not seen.ignores(str(tmp_path / "b.md"))
    assert not seen.ignores("/elsewhere/drafts/x.md")


def test_missing_or_empty_path_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere does not exist"):
        discover([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="a path is empty"):
        discover([""])


def test_inaccessible_path_is_not_a_usage_error(tmp_path: Path) -> None:
    fill(tmp_path, {"closed/a.md": "t"})
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "closed").chmod(0o000)
    named = [tmp_path / "closed" / "a.md", tmp_path / "loop", tmp_path / "closed"]
    try:
        with as_anybody():
            seen = discover(named)
    finally:
        (tmp_path / "closed").chmod(0o755)
    assert seen.files == tuple(named[:2])
    assert seen.failures == ((named[2], f"{named[2]}: cannot be listed: Permission denied"),)
