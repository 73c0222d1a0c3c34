"""The tokenizer and the chat template in a GGUF file's metadata."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from checkpoints_tools.chat.template import ChatTemplate, check_length
from checkpoints_tools.gguf.header import Header
from checkpoints_tools.tokenizer import SPACE, Tokenizer, one_sentence
from specjax.checks import Whole, shown

LONGEST_UNION = 256  # characters of a token that is made of others; real ones have a few dozen
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # kinds of tokens
_WORDS = (  # Llama 3's split; Qwen's differs in the digits alone
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHER = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_OTHER}{_UPPER}*{_LOWER}+|{_OTHER}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REGEXES = {
    "llama3": _WORDS.format(digits=r"\p{N}{1,3}"),
    "qwen2": _WORDS.format(digits=r"\p{N}"),
    "tekken": _TEKKEN,
}
PRE_TOKENIZERS = {  # the names that GGUF files give, by how the text is split
    "default": "gpt2", "gpt-2": "gpt2", "phi-2": "gpt2", "olmo": "gpt2",
    "smollm": "digits", "starcoder": "digits", "refact": "digits",
    "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3", "smaug-bpe": "llama3",
    "qwen2": "qwen2", "deepseek-r1-qwen": "qwen2",
    "tekken": "tekken",
}  # fmt: skip


def gguf_tokenizer(header: Header) -> Tokenizer:
    """The tokenizer of a file, or of the first part of a split model.

    Raises ValueError if the file has none, if it is damaged, or if its kind is not supported.
    """
    kind = header.get("tokenizer.ggml.model", str)
    tokens = header.get("tokenizer.ggml.tokens", list)
    if tokens is None or len(set(tokens)) != len(tokens):
        raise ValueError(f"{header.file}: tokenizer.ggml.tokens must list texts, each once")
    with one_sentence(f"the tokenizer in {header.file} cannot be read"):
        if kind == "gpt2":
            backend = _byte_level(header, tokens)
        elif kind == "llama":
            backend = _sentencepiece(header, tokens)
        else:
            raise ValueError(f"its kind {shown(kind)} is not supported; supported: gpt2, llama")
        _add_tokens(backend, header, tokens)
        chat = _chat_template(header, tokens)
    return Tokenizer(backend, header.file, chat)


def _byte_level(header: Header, tokens: list[str]) -> tokenizers.Tokenizer:
    name = header.get("tokenizer.ggml.pre", str)
    if name is None:
        warnings.warn(
            f"{header.file} does not say how its model splits texts (tokenizer.ggml.pre): they are "
            "split as GPT-2 does, which may give other tokens; newer converters write it",
            stacklevel=2,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"tokenizer.ggml.pre {shown(name)} is not supported; supported: {known}")
    split = PRE_TOKENIZERS[name]
    merges = [tuple(each.split(" ", 1)) for each in header.get("tokenizer.ggml.merges", list, [])]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)}, merges=merges,
            ignore_merges=split in ("llama3", "tekken"),
        )
    )  # fmt: skip
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split not in REGEXES)
    first: list[pre_tokenizers.PreTokenizer] = []
    if split in REGEXES:
        first = [pre_tokenizers.Split(Regex(REGEXES[split]), "isolated")]
    elif split == "digits":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, whole])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(header: Header, tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE joins the pair whose union has the highest score."""
    scores = header.get("tokenizer.ggml.scores", np.ndarray, np.zeros(0)).astype(np.float64)
    if len(scores) != len(tokens):
        raise ValueError("tokenizer.ggml.scores must hold a number for every token")
    ids = {token: index for index, token in enumerate(tokens)}
    unknown = _token_id(header, tokens, "unknown") or 0
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids, merges=_merges(tokens, ids, scores), unk_token=tokens[unknown],
            fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    prefix = header.get("tokenizer.ggml.add_space_prefix", bool, True)
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return backend


def _merges(
    tokens: Sequence[str], ids: dict[str, int], scores: np.ndarray
) -> list[tuple[str, str]]:
    """The pairs of tokens whose union is a token, those with the best unions first."""
    found = []
    for token in tokens:
        ends = range(1, len(token) if len(token) <= LONGEST_UNION else 0)
        pairs = ((token[:end], token[end:]) for end in ends)
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(scores[ids[token]], pair) for pair in known]
    found.sort(key=lambda each: (each[0], len(each[1][0]), len(each[1][1])), reverse=True)
    return [pair for _, pair in found]


def _add_tokens(backend: tokenizers.Tokenizer, header: Header, tokens: list[str]) -> None:
    """Marks the tokens that texts hold as a whole, and puts the first and last around a text."""
    kinds = header.get("tokenizer.ggml.token_type", np.ndarray, np.zeros(len(tokens), np.int32))
    if len(kinds) != len(tokens):
        raise ValueError("tokenizer.ggml.token_type must hold a number for every token")
    special = np.isin(kinds, (UNKNOWN, CONTROL)).nonzero()[0]
    plain = (kinds == USER_DEFINED).nonzero()[0]
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in special])
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in plain])
    sentencepiece = header.get("tokenizer.ggml.model", str) == "llama"
    split = PRE_TOKENIZERS.get(header.get("tokenizer.ggml.pre", str, "default"))
    begins = sentencepiece or split == "llama3"
    names = {}
    for name, place, default in (("bos", "begin", begins), ("eos", "end", False)):
        token = _token_id(header, tokens, name)
        if token is not None and header.get(f"tokenizer.ggml.add_{name}_token", bool, default):
            names[place] = (tokens[token], token)
    if names:
        first, last = ([names[place][0]] if place in names else [] for place in ("begin", "end"))
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=list(names.values())
        )


def _token_id(header: Header, tokens: list[str], name: str) -> int | None:
    """The id of the token for a role, or None if the file does not name one.

    Raises ValueError if the id is outside the vocabulary.
    """
    field = f"tokenizer.ggml.{name}_token_id"
    value = header.get(field, int)
    if value is not None:
        Whole(0, len(tokens) - 1)(field, value)
    return value


def _chat_template(header: Header, tokens: list[str]) -> ChatTemplate | None:
    text = header.get("tokenizer.chat_template", str)
    if text is None:
        return None
    check_length(text, header.file)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {ours: _token_id(header, tokens, theirs) for ours, theirs in names.items()}
    special = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    return ChatTemplate(text, special, str(header.file))


def read_gguf_tokenizer(file: Path) -> Tokenizer:
    """Reads a file's tokenizer. Raises ValueError if it has none, or one that is not supported."""
    return gguf_tokenizer(Header(file))
