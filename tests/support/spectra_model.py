"""The n-gram methods in plain Python for one row, with lists, tuples and dictionaries.

The drafters on the device must agree with them, token for token.
"""

from __future__ import annotations

from collections import Counter, defaultdict

NGram = tuple[int, ...]


class NGrams:
    """The last distinct n-grams, and the two dictionaries over them."""

    def __init__(self, n: int, capacity: int, parts: bool = True) -> None:
        self.n, self.capacity, self.parts = n, capacity, parts
        self.held: list[NGram] = []  # the oldest first

    def insert(self, ngrams: list[NGram]) -> None:
        for ngram in ngrams:
            if ngram in self.held:
                self.held.remove(ngram)
            self.held.append(ngram)
        del self.held[: -self.capacity]

    def insert_text(self, text: list[int], first: int) -> None:
        """Inserts the n-grams that end at place `first` or later. -1 pads the beginning."""
        padded = [-1] * (self.n - 1) + text
        for end in range(max(first, 1), len(text)):
            self.insert([tuple(padded[end : end + self.n])])

    def forward(self, inside: bool) -> dict[int, list[NGram]]:
        """token -> the rest of n-grams after it, at their start or `inside`, the newest first."""
        found = defaultdict(list)
        for ngram in reversed(self.held):
            for place in range(1, self.n - 1) if inside else range(1):
                if ngram[place] >= 0:
                    found[ngram[place]].append(ngram[place + 1 :])
        return found

    def backward(self) -> dict[NGram, int]:
        """context -> the token that followed it last."""
        found = {}
        for ngram in self.held:
            for end in range(1 if self.parts else self.n - 1, self.n):
                for start in range(end if self.parts else 1):
                    if ngram[start] >= 0:
                        found[ngram[start:end]] = ngram[end]
        return found

    def next_token(self, context: list[int]) -> int | None:
        """The token for the longest suffix of the context, at most n - 1 tokens, that is a key."""
        backward = self.backward()
        for size in range(min(self.n - 1, len(context)), 0, -1):
            if tuple(context[-size:]) in backward:
                return backward[tuple(context[-size:])]
        return None


def prompt_lookup(
    text: list[int], draft_length: int, longest: int, shortest: int, whole: bool
) -> list[int]:
    """The tokens after the first occurrence of the longest suffix that occurs."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for start in range(len(text) - size):
            follow = text[start + size :][:draft_length]
            if text[start : start + size] != text[-size:]:
                continue
            if not whole or (len(follow) == draft_length and start + size < len(text) - size):
                return follow
    return []


def most_frequent(text: list[int], draft_length: int, n: int) -> list[int]:
    """The most frequent token after the longest known context, token by token."""
    successors: dict[NGram, Counter[int]] = defaultdict(Counter)
    last_seen: dict[NGram, int] = {}
    for end in range(1, len(text)):
        for size in range(1, min(n - 1, end) + 1):
            context = tuple(text[end - size : end])
            successors[context][text[end]] += 1
            last_seen[*context, text[end]] = end
    draft: list[int] = []
    while len(draft) < draft_length:
        for size in range(n - 1, 0, -1):
            context = tuple((text + draft)[-size:])
            if len(context) == size and context in successors:
                counts = successors[context]
                draft.append(max(counts, key=lambda t: (counts[t], last_seen[*context, t])))
                break
        else:
            break
    return draft


class Window:
    """Lookahead and SPECTRA-CORE for one row: proposals, and updates after a pass.

    Options are the drafter's fields. backward: the largest number of tokens in that guess. counted:
    the budget is one of guesses, not of tokens.
    Lookahead is SPECTRA without parts, backward and refine, with as many n-grams as guesses.
    """

    def __init__(
        self, window: list[int], ngram: int, guesses: int, capacity: int, *, matches: int,
        refine: float, text: bool, forward: bool, backward: int, parts: bool,
        counted: bool = False,
    ) -> None:  # fmt: skip
        self.ngram, self.matches, self.refine = ngram, matches, refine
        self.forward, self.backward, self.text = forward, backward, text
        self.guesses, self.budget, self.counted = guesses, guesses * (ngram - 1), counted
        columns = len(window) // (ngram - 1)
        self.columns = [window[column::columns] for column in range(columns)]
        self.ngrams = NGrams(ngram, capacity, parts)
        self.indexed = 0

    def propose(self, text: list[int]) -> list[tuple[int, int]]:
        """(token, parent) of every node."""
        if self.text:
            self.ngrams.insert_text(text, min(self.indexed, len(text) - 1))
        self.indexed = len(text)
        self.columns[0][0] = text[-1]
        nodes = self._window_nodes()
        first = len(nodes)
        for guess in self._guesses(text):
            node = -1
            for token in guess:
                if (token, node) not in nodes[first:]:
                    nodes.append((token, node))
                node = nodes.index((token, node), first)
        return nodes[: first + self.budget]

    def observe(self, logits: list[list[float]], draws: list[float]) -> None:
        """logits: after the last token and after each node. draws: one per column."""
        count, depth = len(self.columns), self.ngram - 1
        begun = set(self.ngrams.forward(inside=False))
        if self.ngrams.parts:
            begun |= set(self.ngrams.forward(inside=True))
        for index, column in enumerate(self.columns):
            own = logits[(depth - 1) * count + index]
            allowed = [t for t in range(len(own)) if t not in begun]
            if not (draws[index] < self.refine and allowed and self.forward):
                allowed = range(len(own))
            column.append(max(allowed, key=own.__getitem__))
        self.ngrams.insert([tuple(column) for column in self.columns])
        for column in self.columns:
            del column[0]

    def _window_nodes(self) -> list[tuple[int, int]]:
        """The window without its first token, level by level. The first level is a chain."""
        numbers = {(0, 0): -1}
        nodes = []
        for level in range(self.ngram - 1):
            for column, tokens in enumerate(self.columns):
                if (level, column) != (0, 0):
                    parent = (level - 1, column) if level else (0, column - 1)
                    numbers[level, column] = len(nodes)
                    nodes.append((tokens[level], numbers[parent]))
        return nodes

    def _guesses(self, text: list[int]) -> list[NGram]:
        guesses: list[NGram] = []
        if self.forward:
            guesses += self.ngrams.forward(inside=False)[text[-1]][: self.matches]
        if self.forward and self.ngrams.parts:
            guesses += self.ngrams.forward(inside=True)[text[-1]][: self.guesses]
        backward = self._backward_guess(text)
        if self.counted:
            return [each for each in (*guesses, backward) if each][: self.guesses]
        return [backward, *guesses]

    def _backward_guess(self, text: list[int]) -> NGram:
        guess: list[int] = []
        while len(guess) < self.backward:
            token = self.ngrams.next_token(text + guess)
            if token is None:
                break
            guess.append(token)
        return tuple(guess)
