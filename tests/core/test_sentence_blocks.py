"""Sentences in code blocks and tables: each line is one."""

from stillroom.core.sentences import sentences


def _texts(text: str) -> list[str]:
    return [text[slice(*span)] for span in sentences(text)]


def test_each_line_of_a_code_block_is_a_sentence() -> None:
    text = "Run this:\n```sh\nstillroom add docs\nstillroom serve --port 80\n```\nThen open\nthe page."
    assert _texts(text) == [
        "Run this:",
        "```sh",
        "stillroom add docs",
        "stillroom serve --port 80",
        "```",
        "Then open\nthe page.",
    ]


def test_a_code_block_without_an_end_reaches_to_the_end() -> None:
    assert _texts("~~~\na = 1\nb = 2") == ["~~~", "a = 1", "b = 2"]


def test_each_row_of_a_table_without_outer_marks_is_a_sentence() -> None:
    assert _texts("code | meaning\n408 | too late\n429 | full") == ["code | meaning", "408 | too late", "429 | full"]


def test_indented_prose_reads_on_and_indented_code_does_not() -> None:
    manual = (
        "       -J     Set the idle timer of the drive. The factory default is eight\n"
        "              (8) seconds, which is a very poor choice for use in most\n"
        "              systems."
    )
    assert _texts(manual) == [
        "-J     Set the idle timer of the drive.",
        "The factory default is eight\n              (8) seconds, which is a very poor choice for use in most\n"
        "              systems.",
    ]
    code = "    let mut guess = String::new();\n    io::stdin().read_line(&mut guess)\n    println!(guess)"
    assert _texts(code) == [line.strip() for line in code.splitlines()]
    settings = "    max_size = 10\n    timeout = 5\n    name = test"
    assert _texts(settings) == [line.strip() for line in settings.splitlines()]


def test_a_number_in_brackets_begins_an_item_only_behind_the_end_of_another() -> None:
    assert _texts("A tenant may:\n(a) paint; or\n(b) plant.") == ["A tenant may:", "(a) paint; or", "(b) plant."]
    assert _texts("The limit is eight\n(8) seconds.") == ["The limit is eight\n(8) seconds."]
