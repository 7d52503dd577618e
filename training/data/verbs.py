"""Maps past forms to infinitives: founded -> found, became -> become. Ambiguous forms are excluded."""

from collections.abc import Collection

from training.data.words import word_set

_IRREGULAR = dict(
    pair.split(":")
    for pair in [
        "became:become",
        "began:begin",
        "broke:break",
        "brought:bring",
        "built:build",
        "bought:buy",
        "caught:catch",
        "chose:choose",
        "came:come",
        "cost:cost",
        "drew:draw",
        "drove:drive",
        "fell:fall",
        "felt:feel",
        "fought:fight",
        "found:find",
        "flew:fly",
        "forbade:forbid",
        "gave:give",
        "went:go",
        "grew:grow",
        "had:have",
        "held:hold",
        "kept:keep",
        "knew:know",
        "led:lead",
        "left:leave",
        "lent:lend",
        "lost:lose",
        "made:make",
        "meant:mean",
        "met:meet",
        "paid:pay",
        "ran:run",
        "rose:rise",
        "said:say",
        "saw:see",
        "sent:send",
        "sold:sell",
        "sought:seek",
        "shot:shoot",
        "spent:spend",
        "spoke:speak",
        "stood:stand",
        "struck:strike",
        "swore:swear",
        "taught:teach",
        "told:tell",
        "took:take",
        "thought:think",
        "threw:throw",
        "understood:understand",
        "won:win",
        "wore:wear",
        "wrote:write",
        "hosted:host",
        "adopted:adopt",
        "added:add",
        "ended:end",
        "awarded:award",
        "recorded:record",
        "commanded:command",
        "demanded:demand",
        "expanded:expand",
        "founded:found",
        "granted:grant",
    ]
)
_NO_VERB = word_set(
    "united limited hundred supposed advanced related based mixed red bed led-up talented unlimited naked wicked"
)


PAST = rf"(?!(?:{'|'.join(sorted(_NO_VERB))})\b)(?:[a-z]{{2,12}}ed|{'|'.join(sorted(_IRREGULAR))})"
"""Pattern of a word that may be a past form."""


def base_form(word: str, known: Collection[str]) -> str | None:
    """Return the infinitive of a past form; None if the word is not, or may not be, a past form.

    Args:
        known: lower-case words of the language; an infinitive must be among them.
    """
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if not word.endswith("ed") or len(word) < 5 or word in _NO_VERB or not word.isalpha() or not word.islower():
        return None
    stem = word[:-2]
    candidates = [stem + "e", stem]
    if len(stem) > 3 and stem[-1] == stem[-2] and stem[-1] not in "sl":
        candidates.insert(0, stem[:-1])
    if stem.endswith("i"):
        candidates = [stem[:-1] + "y"]
    return next((one for one in candidates if one in known), None)
