"""Signs of toxic and of adversarial text, without a model: English phrases, control tokens, disguises.

They count what is blatant and miss the rest: a text that no pattern finds may still be toxic. Name a classifier where
that matters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_FLAGS = re.IGNORECASE
_PEOPLE = (
    r"jews|muslims|christians|blacks|whites|asians|arabs|gays|lesbians|women|immigrants|foreigners|refugees|disabled"
)
_HARM = (
    r"bombs?|explosives?|napalm|nerve (?:gas|agents?)|ricin|anthrax|meth(?:amphetamine)?|ghost guns?|malware|ransomware"
)

TOXIC: Mapping[str, re.Pattern[str]] = {
    "profanity": re.compile(
        r"\b(?:(?:mother)?fuck\w*|(?:bull|horse)?shit(?:ty|head|s)?|bitch(?:es|y)?|bastards?|ass(?:hole|hat)s?|"
        r"dickheads?|cunts?|wankers?|douchebags?|twats?|crappy|goddamn(?:ed)?)\b",
        _FLAGS,
    ),
    "insult": re.compile(
        r"\b(?:idiot(?:s|ic)?|moron(?:s|ic)?|imbeciles?|dumb ?ass(?:es)?|stupid(?:ity)?|retard(?:ed|s)|scumbags?|"
        r"worthless (?:piece|human|person)|shut (?:the \w+ )?up|screw you|go to hell|drop dead|"
        r"you(?:'re| are) (?:such )?a (?:loser|pig|disgrace))\b",
        _FLAGS,
    ),
    "threat": re.compile(
        r"\b(?:(?:i(?:'ll| will|'m going to| am going to)|we(?:'ll| will)) (?:kill|murder|hurt|beat|rape|shoot) "
        r"(?:you|him|her|them)|kill yourself|(?:you|they) (?:should|deserve to) die|hope (?:you|they) die)\b",
        _FLAGS,
    ),
    "hate": re.compile(
        r"\b(?:(?:i|we) hate|exterminate|get rid of|deport|death to|kill)\s+(?:all\s+)?(?:the\s+|those\s+)?"
        rf"(?:{_PEOPLE})\b|\b(?:{_PEOPLE}) (?:are|should be) "
        r"(?:inferior|subhuman|vermin|animals|parasites|exterminated|killed|banned)\b",
        _FLAGS,
    ),
    "self_harm": re.compile(
        r"\b(?:kill|hurt|cut|hang|harm) myself\b|\bcommit(?:ting)? suicide\b|\bend my (?:own )?life\b", _FLAGS
    ),
    "dangerous": re.compile(
        rf"\b(?:make|making|build|building|cook|cooking|synthesi[sz]e|create|write|assemble)\b[^.\n]{{0,30}}"
        rf"\b(?:{_HARM})\b|\b(?:how (?:to|do i|can i)|ways? to|help me|steps to)\b[^.\n]{{0,30}}"
        r"\b(?:hack into|break into|poison (?:some\w*|my|a|the)|launder|hot-?wire|"
        r"(?:get away with|commit) (?:murder|fraud)|kill (?:some\w*|my|a|the)|stalk|blackmail|forge)\b",
        _FLAGS,
    ),
}
"""Kind of toxic text -> what gives it away."""

_TOKENS = re.compile(
    r"<\|[a-z0-9_]{2,40}\|>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|^\s*<s>|</s>\s*(?:<s>|\Z)|\[/?SYSTEM\]", _FLAGS
)
_RULES = r"(?:instructions?|prompts?|rules?|guidelines?|directions?|constraints?|polic(?:y|ies))"
_OVERRIDE = re.compile(
    r"\b(?:ignore|disregard|forget|override|bypass)\b[^.\n]{0,40}\b(?:previous|prior|above|earlier|all|your|system)"
    rf"\b[^.\n]{{0,40}}\b{_RULES}\b"
    r"|\b(?:ignore|disregard|forget)\s+(?:everything|all|anything)\b[^.\n]{0,30}"
    r"\b(?:above|before|follows|earlier|said)\b"
    r"|\bnew instructions? with the highest priority\b|\bthe request above is (?:cancelled|void)\b",
    _FLAGS,
)
_ROLE = re.compile(
    r"\b(?:you are|you're|act as|pretend|from now on|role-?play|stay in (?:the )?(?:role|character))\b[^.\n]{0,80}"
    r"\b(?:(?-i:DAN)|do anything now|unrestricted|uncensored|unfiltered|amoral|jailbroken|developer mode"
    r"|(?:no|without(?: any)?) (?:rules|restrictions|limits|limitations|filters?|guidelines|ethics|morals)"
    r"|whatever is written)\b|\bdo anything now\b|\bdeveloper mode (?:enabled|on)\b|\bjailbreak\b",
    _FLAGS,
)
_LEAK = re.compile(
    r"\b(?:repeat|reveal|print|show|output|tell me|what (?:is|are))\b[^.\n]{0,40}"
    r"\b(?:system|hidden|initial|original|secret) (?:prompt|instructions?|message)\b",
    _FLAGS,
)
_LANGUAGES = re.compile(
    r"\bignore[zr]\b[^.\n]{0,40}\b(?:précède|précédentes?|dessus|instructions)\b"
    r"|\b(?:vergiss|ignoriere?|missachte)\b[^.\n]{0,40}\b(?:oben|vorherigen?|bisherigen?|anweisungen)\b"
    r"|\b(?:olvida|ignora)\b[^.\n]{0,40}\b(?:anterior(?:es)?|instrucciones|precedent[ei]|istruzioni)\b"
    r"|(?:忽略|无视)[^。\n]{0,20}(?:以上|之前|指令|内容)|игнорируй[^.\n]{0,40}(?:инструкци|выше)",
    _FLAGS,
)
_HIDDEN = re.compile(
    "(?<=[A-Za-z])[\u200b-\u200d\u2060\ufeff](?=[A-Za-z])"  # zero width, inside a word
    "|[\u202a-\u202e\u2066-\u2069]"  # turns the direction of text round
    "|[A-Za-z][\u0370-\u03ff\u0400-\u04ff][A-Za-z]"  # Greek or Cyrillic letters in a Latin word
)
_SIXTY_FOUR = "[A-Za-z0-9+/]"
_BASE64 = re.compile(  # long, with small and capital letters and digits: no word, path or hexadecimal digest
    rf"(?<!{_SIXTY_FOUR})(?={_SIXTY_FOUR}*[a-z])(?={_SIXTY_FOUR}*[A-Z])(?={_SIXTY_FOUR}*\d){_SIXTY_FOUR}{{32,}}={{0,2}}"
)
_APART = re.compile(r"(?:\b[A-Za-z][-_.*]){4,}[A-Za-z]\b|(?:\b[A-Za-z] ){9,}[A-Za-z]\b")
_LEET = str.maketrans("013457@$", "oieastas")
_LEET_WORDS = re.compile(
    r"\b(?:ignore|disregard|bypass)\b[^.\n]{0,30}\b(?:above|previous|all|instructions?|rules?)\b", _FLAGS
)


def toxic(text: str) -> list[str]:
    """The kinds of `TOXIC` that a text shows."""
    return [kind for kind, pattern in TOXIC.items() if pattern.search(text)]


def control_tokens(text: str) -> bool:
    """Whether a text spells out tokens that only a chat template should write."""
    return _TOKENS.search(text) is not None


def adversarial(text: str) -> list[str]:
    """The kinds of attack that a prompt shows, by the names of `alignment data augment`, and `prompt_leak`."""
    kinds = {
        "instruction_override": _OVERRIDE,
        "role_play": _ROLE,
        "prompt_leak": _LEAK,
        "language_switch": _LANGUAGES,
        "special_tokens": _TOKENS,
    }
    found = [kind for kind, pattern in kinds.items() if pattern.search(text)]
    return [*found, "obfuscation"] if _disguised(text) else found


def _disguised(text: str) -> bool:
    """Characters that nobody sees, base64, words spelled l-i-k-e t-h-i-s, or an override in 1337."""
    if _HIDDEN.search(text) or _BASE64.search(text) or _APART.search(text):
        return True
    plain = text.translate(_LEET)
    return plain != text and _LEET_WORDS.search(text) is None and _LEET_WORDS.search(plain) is not None
