"""Which words of a response its author stands by.

What is said under a supposition, of an aim, with a denial or as a question is no claim: "Let AB =
5", "to find AC", "it is not that AB = 5", "is AB = 5?". A supposition lasts to the end of its
sentence and over the next one where that goes on with "then".
"""

from __future__ import annotations

from collections.abc import Sequence

from adora_vl.geometry.tokens import ResponseToken

_SUPPOSING_WORDS = {
    "if",
    "suppose",
    "supposing",
    "assume",
    "assuming",
    "let",
    "let's",
    "lets",
    "letting",
    "denote",
    "unless",
    "whether",
    "imagine",
    "say",
    "call",
    "check",
    "verify",
    "test",
    "try",
}
_HEDGING_WORDS = {
    "would",
    "could",
    "might",
    "may",
    "should",
    "maybe",
    "perhaps",
    "probably",
    "guess",
    "possibly",
    "were",
    "thought",
}
# Behind these and a colon stands what is meant: "let's verify: AB = 5", "Check: AB = 5".
_CHECKING_WORDS = {"check", "verify", "test"}
_DEFINING_WORDS = {
    "let",
    "let's",
    "lets",
    "letting",
    "denote",
    "call",
}  # of these, "then" supposes nothing
_CHOICE_WORDS = {"option", "choice"}
_AIM_VERBS = {"find", "determine", "calculate", "compute", "solve", "prove", "show", "evaluate"}
_WISH_WORDS = {"want", "wants", "need", "needs", "asked", "asks", "looking"}
_DENYING_WORDS = {
    "not",
    "isn't",
    "aren't",
    "doesn't",
    "don't",
    "can't",
    "cannot",
    "never",
    "neither",
    "nor",
    "won't",
    "wouldn't",
    "couldn't",
    "didn't",
    "without",
}
_REFUTING_WORDS = {
    "incorrect",
    "wrong",
    "false",
    "impossible",
    "absurd",
    "contradiction",
    "mistake",
}
_REFUTING_WORDS_AFTER_NOT = {"possible", "true", "correct", "valid", "right", "consistent"}
_CLAUSE_ENDS = {
    ",",
    ";",
    ":",
    "so",
    "thus",
    "therefore",
    "hence",
    "but",
    "because",
    "since",
    "however",
    "which",
    "giving",
    "gives",
    "then",
    "where",
}
_SUPPOSITION_ENDS = {"but", "however", "actually", "instead"}
_FACT_WORDS = {"fact", "information", "given", "know", "known", "property"}
# Behind one of these an aim is reached: "we find AB = 5".
_WORDS_BEFORE_RESULT = {"we", "i", "can", "you", "and"}


def mark_asserted_tokens(tokens: Sequence[ResponseToken]) -> list[bool]:
    """Tell for each token of a response whether what is said there is meant as it stands.

    What is supposed, aimed at, denied or asked is not meant so.
    """
    asserted: list[bool] = []
    is_supposed_before = False
    start = 0
    for number, token in enumerate(tokens):
        ends_sentence = token.kind == "line" or token.text in (".", "?", "!")
        if ends_sentence or number == len(tokens) - 1:
            sentence = _Sentence(tokens[start : number + 1], is_supposed_before)
            asserted += sentence.mark_asserted()
            if any(sentence_token.kind != "line" for sentence_token in sentence.tokens):
                is_supposed_before = sentence.then_supposes
            start = number + 1
    return asserted


class _Sentence:
    """One sentence as tokens, to find out which of its words the author stands by.

    `is_supposed_before`: whether the sentence before it was a supposition, which goes on with
    "then". `then_supposes`: whether a next sentence with "then" supposes as well.
    """

    def __init__(self, tokens: Sequence[ResponseToken], is_supposed_before: bool) -> None:
        self.tokens = tokens
        self.words = [token.text.lower() for token in tokens]
        self.is_supposed = is_supposed_before and self.words[:1] == ["then"]
        self.then_supposes = self.is_supposed

    def mark_asserted(self) -> list[bool]:
        """Tell for each token of the sentence whether the author stands by it.

        A clause ends at a comma or a word such as "so", and what blocks it ends there too. A
        supposition goes on to the end of the sentence, or to a word such as "but". Sets
        `is_supposed` and `then_supposes`.
        """
        if self.words and self.words[-1] == "?":
            # "What if AB = 5? Then" supposes as well.
            self.then_supposes = any(
                self._begins_supposition(position) for position in range(len(self.words))
            )
            return [False] * len(self.words)
        asserted: list[bool] = []
        clause_start = 0
        is_blocked = False
        for position, word in enumerate(self.words):
            if word in _CLAUSE_ENDS:
                is_blocked = False
                clause_start = position
            if word == ":" and self._announces_check(position):
                self.is_supposed = False
                self.then_supposes = False
            if word in _SUPPOSITION_ENDS:
                self.is_supposed = False
                self.then_supposes = False
            if word == "that" and position and self.words[position - 1] in _FACT_WORDS:
                is_blocked = False  # "we need to use the fact that"
            if self._begins_supposition(position):
                self.is_supposed = True
                self.then_supposes = self.then_supposes or word not in _DEFINING_WORDS
            if word in _HEDGING_WORDS or word in _DENYING_WORDS or self._states_aim(position):
                is_blocked = True
            if self._refutes_clause(position):
                asserted[clause_start:] = [False] * (len(asserted) - clause_start)
                is_blocked = True
            asserted.append(not is_blocked and not self.is_supposed)
        return asserted

    def _announces_check(self, position: int) -> bool:
        """Tell whether a colon stands behind words alone that announce a check: "let's verify:"."""
        earlier_words = set(self.words[:position])
        has_value = any(token.kind != "word" for token in self.tokens[:position])
        supposes_more = bool(earlier_words & (_SUPPOSING_WORDS - _CHECKING_WORDS - _DEFINING_WORDS))
        return bool(_CHECKING_WORDS & earlier_words) and not has_value and not supposes_more

    def _begins_supposition(self, position: int) -> bool:
        """Tell whether the word at a position begins a supposition, as "if" and "Option B" do."""
        word = self.words[position]
        if position == 0 and word in _CHOICE_WORDS:
            return True  # "Option B: AB = 5"
        if word not in _SUPPOSING_WORDS or self.tokens[position].kind != "word":
            return False
        # "as if", "we can say that" and "check that" suppose nothing.
        next_word = self.words[position + 1] if position + 1 < len(self.words) else ""
        return not (word in ("say", "verify", "check") and next_word == "that")

    def _states_aim(self, position: int) -> bool:
        """Tell whether the word at a position says what is to be found: "find AB".

        "We find AB = 5" and "find that" say what was found.
        """
        word = self.words[position]
        if word in _WISH_WORDS:
            return True
        if word not in _AIM_VERBS:
            return False
        previous_word = self.words[position - 1] if position else ""
        next_word = self.words[position + 1] if position + 1 < len(self.words) else ""
        return previous_word not in _WORDS_BEFORE_RESULT and next_word != "that"

    def _refutes_clause(self, position: int) -> bool:
        """Tell whether the word at a position says of what stands before it that it is not so."""
        word = self.words[position]
        previous_word = self.words[position - 1] if position else ""
        if word in _REFUTING_WORDS:
            return True
        return previous_word in _DENYING_WORDS and word in _REFUTING_WORDS_AFTER_NOT
