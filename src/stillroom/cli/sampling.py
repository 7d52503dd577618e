"""The flags that say how tokens are picked. Each has the name of the setting and of the field of `AskOptions`; without
it, as configured. Ranges that only the engine knows are checked there."""

from typing import Annotated

import typer

MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", min=-1, metavar="N", help="Most tokens in an answer; without it, as configured (256); -1: any."
    ),
]
MinTokensOption = Annotated[
    int, typer.Option("--min-tokens", min=0, metavar="N", help="The model cannot end its answer before this many.")
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token each time.")
]
TopPOption = Annotated[
    float | None, typer.Option("--top-p", metavar="P", help="Sample from the likeliest tokens up to this sum.")
]
SampleTopKOption = Annotated[
    int | None,
    typer.Option(
        "--sample-top-k", min=-1, metavar="N", help="Sample from so many of the likeliest tokens; 0 or -1: all."
    ),
]
MinPOption = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Sample from tokens at least this likely beside the likeliest one."),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option("--repetition-penalty", metavar="X", help="Above 1: less of what prompt and answer already have."),
]
PresencePenaltyOption = Annotated[
    float | None, typer.Option("--presence-penalty", metavar="X", help="Above 0: less of what the answer already has.")
]
FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option("--frequency-penalty", metavar="X", help="Above 0: the less, the more often the answer has it."),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=-1, metavar="N", help="Same seed, same question: same answer; -1: random.")
]
