"""How a byte-level BPE vocabulary cuts text into words before merging: one rule per `tokenizer.ggml.pre`.

A rule is a list of patterns. Each pattern in turn cuts every piece left by the ones before it; what a pattern
matches becomes a piece of its own, and so does what lies between two matches. The patterns are those the
vocabularies were trained with, as llama.cpp applies them (src/llama-vocab.cpp), in Oniguruma's syntax.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamatrio.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rule of a family of vocabularies."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token stays whole, whatever the merges say."""
    adds_bos: bool = False
    """What `tokenizer.ggml.add_bos_token` is taken for where the file does not say."""


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN35_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_LLAMA3_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
# As o200k was trained, with Unicode's letter cases and marks; llama.cpp's engine knows those of ASCII only, and cuts
# Devanagari and the like, and É after ü, elsewhere.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_ENDING = rf"(?:{_CONTRACTIONS})?"
_O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_O200K_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_O200K_ENDING}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATION = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
# The cased alphabets of DeepSeek's first vocabularies, range by range.
_CASED_LETTERS = (
    "[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943]"
)

_GPT2 = PreTokenizer((_GPT2_WORDS,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2_WORDS))
_QWEN2 = PreTokenizer((_QWEN2_WORDS,))
_LLAMA3 = PreTokenizer((_LLAMA3_WORDS,), ignore_merges=True, adds_bos=True)

_RULES = {
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer((_QWEN35_WORDS,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-4o": PreTokenizer((_O200K_WORDS,)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?{_CASED_LETTERS}+", rf"\s?{_PUNCTUATION}+", r"\s+\z", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule that `tokenizer.ggml.pre` names.

    Raises:
        UnsupportedModelError: a rule we do not have. Another rule in its place would give other ids, and the
            model would answer worse without anyone noticing.
    """
    if name not in _RULES:
        raise UnsupportedModelError(f"the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported")
    return _RULES[name]
