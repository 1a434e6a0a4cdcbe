"""Facts in short words, as the text form has them: `AB = 5`, `angle ABC = 40`, `AB parallel CD`."""

from __future__ import annotations

from adora_vl.geometry.logic_form import Term

_WORD_BY_MEASURE = {
    "AreaOf": "area",
    "PerimeterOf": "perimeter",
    "RadiusOf": "radius",
    "DiameterOf": "diameter",
    "CircumferenceOf": "circumference",
    "HeightOf": "height",
    "AltitudeOf": "height",
    "MedianOf": "median",
    "SinOf": "sin",
    "CosOf": "cos",
    "TanOf": "tan",
}
_WORDS_BETWEEN_PARTS = {
    "Equals": "=",
    "Perpendicular": "perpendicular",
    "Parallel": "parallel",
    "Similar": "similar",
    "Congruent": "congruent",
    "Supplementary": "supplementary to",
    "Complementary": "complementary to",
    "PointLiesOnLine": "on",
    "PointLiesOnCircle": "on",
    "Tangent": "tangent",
    "BisectsAngle": "bisects",
    "IsMidpointOf": "midpoint of",
    "IsDiameterOf": "diameter of",
    "InscribedIn": "inscribed in",
    "CircumscribedTo": "around",
}
_SIGN_BY_OPERATION = {
    "Add": " + ",
    "SumOf": " + ",
    "Sub": " - ",
    "Mul": " * ",
    "Div": " / ",
    "RatioOf": " / ",
}


def term_in_words(term: Term) -> str:
    """Return a term in words; what has no words of its own stands as it is written."""
    if not term.arguments:
        return term.head
    if term.head == "Find":
        return "what the question says of its shape"
    parts = [term_in_words(argument) for argument in term.arguments]
    joined = "".join(name for name in term.names if not name.startswith("radius"))
    if term.head in ("Line", "Point"):
        return joined
    if term.head in ("LengthOf", "MeasureOf") and len(parts) == 1:
        return parts[0]
    if term.head == "Circle":
        return f"circle {term.names[0]}"
    if term.head in _WORD_BY_MEASURE and len(parts) == 1:
        return f"{_WORD_BY_MEASURE[term.head]} {parts[0]}"
    if term.head in _WORDS_BETWEEN_PARTS and len(parts) == 2:
        return f"{parts[0]} {_WORDS_BETWEEN_PARTS[term.head]} {parts[1]}"
    if term.head in _SIGN_BY_OPERATION:
        return _SIGN_BY_OPERATION[term.head].join(parts)
    if all(not argument.arguments for argument in term.arguments):
        return f"{term.head.lower()} {joined}"
    return f"{term.head.lower()} {', '.join(parts)}"
