"""The values of a template's variables, as some of its lines have them."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

import redis

from pipeline.drain.learner import template_texts
from pipeline.errors import BadInput, NotFound
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.service.lines import stored_lines
from pipeline.service.questions import LinesAsked
from pipeline.service.stored.usual import usual_values
from pipeline.service.stored.values import TemplateValues, VariableValues
from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers

_HOLE: Final = re.compile(r"<(\*|[A-Z][A-Z0-9_]*)>")
TOP: Final = 10
MAX_HOLES: Final = 30
MAX_MESSAGE: Final = 4_000  # characters of a message that are looked at
MAX_VALUE: Final = 200


def stored_values(
    answers: Answers, client: "redis.Redis", settings: Settings, asked: LinesAsked
) -> TemplateValues:
    """Of the lines of `asked`, which names a template and a span.

    Raises BadInput, NotFound, RedisUnavailable, and as `Answers` does."""
    number = asked.template_id
    if number is None or asked.since is None or asked.until is None:
        raise BadInput("values belong to a template in a span; name both")
    with answering():
        text = template_texts(client, Keys(settings.redis.key_prefix)).get(number)
    lines = stored_lines(answers, settings, asked).lines
    if (text is None or asked.only) and not lines:  # its text may have words of other workloads
        raise NotFound(
            f"there is no pattern T{number} in this span; ask for another span, or for a pattern of its list"
        )
    return TemplateValues(
        template_id=number,
        template=text,
        since=asked.since,
        until=asked.until,
        lines=len(lines),
        variables=values_of(text or "", [one.message or "" for one in lines]),
        hosts=dict(Counter(one.host for one in lines if one.host).most_common(TOP)),
        levels=dict(Counter(one.level for one in lines if one.level).most_common(TOP)),
        usual=usual_values(client, settings, sorted({one.workload for one in lines})[:TOP], number),
    )


def values_of(template: str, messages: Sequence[str]) -> list[VariableValues]:
    """The values in these messages of each variable, in the order of the template.

    Messages that the template does not cover as it stands now count for nothing: a template widens."""
    holes = [match[1] for match in _HOLE.finditer(template)][:MAX_HOLES]
    if not holes:
        return []
    words = [_HOLE.split(word)[::2] for word in template.split()]
    counts: list[Counter[str]] = [Counter() for _ in holes]
    matched = 0
    for message in messages:
        found = _values(words, message[:MAX_MESSAGE].split())
        if found is None:
            continue
        matched += 1
        for counter, value in zip(counts, found, strict=False):
            counter[value[:MAX_VALUE]] += 1
    return [
        VariableValues(
            place=at, mask=mask, values=counter.most_common(TOP), distinct=len(counter), lines=matched
        )
        for at, (mask, counter) in enumerate(zip(holes, counts, strict=True), 1)
    ]


def _values(words: list[list[str]], written: list[str]) -> list[str] | None:
    """The values of all holes, None where the message is none of the template's.

    `words`: of the template, each as the texts around its holes. A hole holds no space and at least one
    character. Each text is taken where it stands first, so the time is linear: a regular expression would try
    every place of every hole."""
    if len(words) != len(written):
        return None
    found: list[str] = []
    for (first, *between), word in zip(words, written, strict=True):
        if not between:
            if word != first:
                return None
            continue
        *inner, last = between
        at, end = len(first), len(word) - len(last)
        if not word.startswith(first) or not word.endswith(last):
            return None
        for text in inner:
            place = word.find(text, at + 1, end)
            if place < 0:
                return None
            found.append(word[at:place])
            at = place + len(text)
        if at >= end:
            return None
        found.append(word[at:end])
    return found
