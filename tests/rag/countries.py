"""Three documents that the bundled decoder can read, and a question about them."""

from stillroom.config.settings import ReuseConfig, StillroomConfig
from stillroom.rag.answer import Answer
from stillroom.rag.stillroom import Stillroom

TEXTS = {
    "ardun": "The capital of Ardun is Belmar . The river of Ardun is the Tolvane .",
    "corvia": "The capital of Corvia is Denholm . The river of Corvia is the Esk .",
    "fenland": "The capital of Fenland is Garth . The river of Fenland is the Holm .",
}
ALWAYS = StillroomConfig(reuse=ReuseConfig(load="always"))
"""Without this, computing can be faster than loading for the small bundled model."""


def ask(stillroom: Stillroom, question: str = "What is the capital of Ardun ?") -> Answer:
    return stillroom.ask(question)
