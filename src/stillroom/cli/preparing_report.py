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
    _show_limits(plan)
    line(_advice(plan))


def _show_limits(plan: "PreparingPlan") -> None:
    line(
        f"The gain for later questions depends on how often questions repeat: {plan.num_repeated:,} of these "
        f"{count(plan.num_requests, 'request')} repeat an earlier one. Requests are drawn by how often each question "
        "stands in the questions given, or by --zipf if none stands there twice."
    )
    if plan.has_few_first:
        from stillroom.planner.preparing import LEAST_FIRST

        line(
            f"Warning: only {count(plan.num_first, 'first question')}. With fewer than {LEAST_FIRST}, a share of them "
            "is uncertain by more than 20 points (95 %), as much as the budgets of 5% and 25% are apart. Give more "
            "questions: --questions, --different, --requests."
        )


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
    if plan.mode != "prepared":
        text += ' It needs reuse.mode = "prepared", with which answers may change (docs/prepared.md).'
    return text + _budgets(plan)


def _budgets(plan: "PreparingPlan") -> str:
    """Return the sizes that the advice needs set, and the setting that keeps a part of it out of host memory."""
    text = ""
    shown = [
        f'{one.path} = "{one.after // 1024**2}MiB" instead of {size(one.before)}'
        for one in plan.changes
        if isinstance(one.before, int) and isinstance(one.after, int)
    ]
    if shown:
        text += f" Set {' and '.join(shown)}."
    if plan.host_limit is not None:
        name, num_bytes = plan.host_limit
        text += f" Host memory holds {size(num_bytes)} of it ({name}); the rest is read from disk."
    return text


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
