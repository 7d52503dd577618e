"""The part of `stillroom plan`'s text that is about preparing documents."""

from typing import TYPE_CHECKING

from stillroom.cli.console import count, duration, line, size

if TYPE_CHECKING:
    from stillroom.planner.preparing import PreparingPlan, PreparingRow

_WIDTH = 18
_HEAD = ("chunks", "on disk", "idle time", "covered", "partly", "first", "later", "all")


def show_preparing(plan: "PreparingPlan") -> None:
    line(f"Preparing: {count(plan.num_chunks, 'chunk')} in {count(plan.num_documents, 'document')}.")
    if plan.refusal:
        line(f"Not possible with this model: {plan.refusal}")
        return
    line(
        f"Simulated: {count(plan.num_requests, 'request')} of every second question, beginning without kept KV. The "
        f"searches of the other questions decide what is prepared first. {plan.num_first:,} are first questions: they "
        "need a chunk that no earlier request needed. Covered: all chunks of a first question are prepared; partly: "
        "some."
    )
    line(f"Times to first token are means; of a first question's, {_seconds(plan.search_seconds)} is search.")
    line("".join([f"{'':<{_WIDTH}}", *(f"  {name:>10}" for name in _HEAD)]))
    if plan.mode != "prepared":
        _show_row(f"{plan.mode}, none", plan.today)
    for row in plan.rows:
        name = "prepare.disk_bytes" if row.share is None else f"{row.share:.0%} of the chunks"
        _show_row(name, row)
    line(_advice(plan))


def _show_row(name: str, row: "PreparingRow") -> None:
    prepared = row.prepared
    cells = (
        f"{prepared.num_chunks:,}",
        size(prepared.num_bytes),
        duration(prepared.seconds),
        f"{row.all_covered:.0%}",
        f"{row.partly_covered:.0%}",
        _seconds(row.first_seconds),
        _seconds(row.later_seconds),
        duration(row.seconds),
    )
    line("".join([f"{name:<{_WIDTH}}", *(f"  {cell:>10}" for cell in cells)]))


def _advice(plan: "PreparingPlan") -> str:
    advice = plan.advice
    if advice is None:
        return "Preparing documents gains nothing here."
    prepared = advice.prepared
    share = prepared.num_chunks / max(1, plan.num_chunks)
    text = (
        f"Preparing {share:.0%} of the chunks ({size(prepared.num_bytes)}, {duration(prepared.seconds)} of idle time) "
        f"answers {advice.all_covered:.0%} of first questions from prepared KV: on average "
        f"{_seconds(advice.first_seconds)} instead of {_seconds(plan.today.first_seconds)}, later ones "
        f"{_seconds(advice.later_seconds)} instead of {_seconds(plan.today.later_seconds)}."
    )
    if plan.mode == "prepared":
        return text
    return f'{text} It needs reuse.mode = "prepared", with which answers may change (docs/prepared.md).'


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
