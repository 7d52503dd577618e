"""Questions made from text: the answer recurs in a passage without the sentence that became the question."""

import re

from training.reader.examples import Coder
from training.reader.recurring import Article, make_questions

TEXTS = (
    "Ada Lovelace wrote the first published program for the Analytical Engine. She was a daughter of Lord Byron.",
    "The Analytical Engine was a proposed general computer. Charles Babbage described the Analytical Engine in 1837. "
    "It was never built in his lifetime because money for the general computer ran out in 1842.",
    "In 1837 a first description of the proposed computer was published by Charles Babbage in London.",
)


def test_no_question_can_be_answered_by_its_own_sentence(coder: Coder) -> None:
    found = make_questions(
        [Article("Analytical Engine", TEXTS), Article("Alone", ("Nothing recurs here at all.",))], coder
    )
    assert found.questions
    for one in found.questions:
        passage = found.passages[one.passage]
        answers = {passage.text[passage.offsets[a][0] : passage.offsets[b][1]] for a, b in one.spans}
        assert len(answers) == 1 and re.search(rf"\b{re.escape(answers.pop())}\b", " ".join(TEXTS))
        assert all(0 <= other < len(found.passages) for other in one.negatives)
    own = [one for one in found.questions if one.passage >= len(TEXTS) + 1]
    assert all(found.passages[one.passage].text not in TEXTS for one in own)


def test_the_same_seed_gives_the_same_questions(coder: Coder) -> None:
    articles = [Article("Analytical Engine", TEXTS)]
    assert make_questions(articles, coder, 1).questions == make_questions(articles, coder, 1).questions
