"""`python -m eval.logicvista`: LogicVista; its official score asks a judge which letters an answer
names.
"""

import re
from functools import partial
from operator import itemgetter

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.evals.inference.dataset import load_problems
    from adora_vl.evals.inference.predictions import TEXT, TEXTS, wrong_fields
    from adora_vl.evals.options import HubDataOptions
    from adora_vl.evals.records import Benchmark, Extraction, Prediction, RowGrade
    from adora_vl.evals.scoring.choice import extract_choice
    from adora_vl.evals.scoring.judge import (
        ExtractionOptions,
        Question,
        extraction_rules,
        with_extractions,
    )
    from adora_vl.evals.scoring.score import verdict_of
    from adora_vl.rewards.completion import answer_block, last_boxed
    from adora_vl.rewards.thinking import final_part

COLUMNS = {"question": TEXT, "answer": TEXT, "skill": TEXTS}
check = partial(wrong_fields, kinds=COLUMNS)
_LETTERS = "ABCDEFGHI"  # letters that an option may have; the options stand in the picture
_JOINED = r"[A-I](?:(?:\s*(?:,|&|and)\s*)+[A-I])*"
_SEVERAL = re.compile(
    r"(?:\b(?i:answers?|choices?|options?)\b[^.\n"
    rf"]{{0,40}}?(?i:\b(?:is|are)\b|[:：])\W*|^\W*)({_JOINED})\W*(?=$|\n"
    r"|\.)"
)


def letters_of(value: object) -> list[str]:
    """Return the options that an answer or an extraction names, in lower case and sorted.

    They are equal for `A, C`, `AC` and `['c', 'a']`.
    """
    words = value if isinstance(value, list) else re.split(r"[\s,;&]+|\band\b", str(value or ""))
    words = [str(word).strip().strip("'\"[](). ").lower() for word in words]
    if len(words) == 1 and re.fullmatch("[a-i]{2,4}", words[0]):
        words = list(words[0])
    return sorted(word for word in words if word)


def by_rules(response: str) -> Extraction:
    """Return the letters in a response behind its thinking, and the rule that found them.

    They stand in a box, or are stated together, such as `B and D`; else the one letter by our rules
    counts.
    """
    response = final_part(response)
    response = answer_block(response) or response
    several = list(_SEVERAL.finditer(response.strip()))
    candidates = (
        (last_boxed(response) or "", "box"),
        (several[-1][1] if several else "", "stated_letters"),
    )
    for text, rule in candidates:
        plain = re.sub(r"\\text\{([^{}]*)\}|[()\s]+$|^[(\s]+", r"\1", text)
        if re.fullmatch(_JOINED, plain):
            return Extraction(plain, rule)
    return extract_choice(response, [""] * len(_LETTERS))


def grade(row: Prediction, options: ExtractionOptions) -> RowGrade:
    """Return the verdict on a row.

    It is right if its letters are those of the reference answer, and no others.
    """
    read: Extraction = row["parsed_answer"]
    named = letters_of(read.text)
    right = letters_of(row["answer"])
    return RowGrade(
        verdict=verdict_of(named == right),
        extracted=", ".join(named),
        reason=read.method,
        groups={"skill": row["skill"]},
        extraction=read,
    )


# The question is asked as it is, since its options are in the picture.
load = partial(
    load_problems,
    needed=("id", *COLUMNS),
    image_columns=("image", "imagename"),
    prompt=itemgetter("question"),
    check=check,
    id_column="id",
    pictures="images",
)
BENCHMARK = Benchmark(
    name="logicvista",
    split="test",
    load=load,
    grade=grade,
    rules=lambda options: {"rules": "official", **extraction_rules(options)},
    score_options=ExtractionOptions,
    data_options=HubDataOptions,
    check=check,
    fingerprint=("data_revision",),
    id_column="id",
    prepare=partial(
        with_extractions,
        question_of=lambda row: Question(
            kind="text", text=row["question"], choices=(), response=row["response"]
        ),
        rules=lambda row: by_rules(row["response"]),
    ),
)
if __name__ == "__main__":
    with imports():
        from eval.command import main
    raise SystemExit(main(BENCHMARK))
