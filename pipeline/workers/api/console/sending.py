"""Send and access: how each shipper sends and whether it was heard; keys and the audit log for admins."""

from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Form, Query, Request
from fastapi.responses import Response

from pipeline.errors import NotFound
from pipeline.records.batch import utc_now
from pipeline.service.access.audit import read_audit
from pipeline.service.access.key_changes import KeyAsked, add_key, read_keys, revoke_key
from pipeline.service.access.keys import ADMIN, SEND
from pipeline.service.access.snippets import (
    SNIPPETS,
    chosen_snippet,
    intake_urls,
    of_scheme,
    snippet_text,
)
from pipeline.service.senders import has_fallen_silent, read_senders
from pipeline.service.values import HeardSender
from pipeline.workers.api.asking import Api, api_of
from pipeline.workers.api.console.decisions import answer_change
from pipeline.workers.api.console.doors import ConsoleRoute, sees
from pipeline.workers.api.console.views import Visitor, render

router: Final = APIRouter(include_in_schema=False, route_class=ConsoleRoute)
See = Annotated[Visitor, Depends(sees())]
Admin = Annotated[Visitor, Depends(sees(ADMIN, whole=True))]
Short = Annotated[str, Form(max_length=200)]
AUDIT: Final = 30
FIRST: Final = "curl"
ORDER: Final = (
    "curl", "opentelemetry", "fluent-bit", "filebeat", "vector", "logstash", "loki", "rsyslog", "syslog-ng",
    "docker", "python", "node",
)  # fmt: skip
MEANS: Final = {
    "send": "lines to the intake, and nothing else",
    "read": "see everything but keys and the audit log",
    "mark": "also mark patterns and decide on incidents",
    "operate": "also trainings, models, watchlist, dead letters, GPU leases",
    "admin": "also keys and the audit log",
}


@router.get("/send")
async def send_page(
    request: Request,
    visitor: See,
    *,
    how: Annotated[str, Query(max_length=40)] = FIRST,
    audit: Annotated[str | None, Query(max_length=2_000)] = None,
    done: Literal["", "revoked"] = "",
) -> Response:
    """A configuration to copy, and the keys."""
    if how not in SNIPPETS:
        raise NotFound(f"there is no snippet {how[:40]!r}; use one of {', '.join(ORDER)}")
    api = api_of(request)
    urls = await api.facts(intake_urls, api.settings)
    keyed = (await api.keys.ring()).sending
    chosen = chosen_snippet(how, urls)[0]
    over_http = of_scheme(urls, "http") is not None
    return render(
        request, visitor, "send.html",
        urls=urls, keyed=keyed, how=how, chosen=chosen, over_http=over_http, done=done,
        text=snippet_text(how, urls, keyed=keyed) if over_http else "",
        shippers=[(name, chosen_snippet(name, urls)[0]) for name in ORDER],
        heard=await _heard(api, visitor), now_silent=partial(has_fallen_silent, now=utc_now()), means=MEANS, **await _of_admins(api, visitor, audit),
    )  # fmt: skip


@router.post("/do/key")
async def post_added_key(
    request: Request,
    visitor: Admin,
    *,
    name: Short,
    scope: Annotated[list[str], Form(max_length=10)] = [],  # noqa: B006 - FastAPI copies it
    workload: Short = "",
    only: Annotated[str, Form(max_length=2_000)] = "",
    lasts: Short = "",
) -> Response:
    """Makes a key and shows it, this once."""
    api = api_of(request)
    first = SEND in scope and not (await api.keys.ring()).sending
    asked = KeyAsked(
        name=name.strip(),
        scopes=scope,
        workload=workload.strip(),
        only=only.replace(",", " ").split(),
        lasts=lasts.strip() or None,
    )
    new = await api.facts(add_key, api.client, api.settings, asked, by=visitor.asker.name)
    return render(request, visitor, "key.html", new=new, first=first)


@router.get("/send/revoke")
async def revoke_page(
    request: Request, visitor: Admin, name: Annotated[str, Query(max_length=200)]
) -> Response:
    """The question before a key is revoked."""
    api = api_of(request)
    keys = await api.facts(read_keys, api.client, api.settings)
    key = next((one for one in keys if one.name == name), None)
    if key is None:
        raise NotFound(f"there is no key {name[:60]!r} any more")
    last = SEND in key.scopes and sum(SEND in one.scopes for one in keys) == 1
    return render(request, visitor, "revoke.html", key=key, last=last)


@router.post("/do/key/revoke")
async def post_revoked_key(request: Request, visitor: Admin, name: Short) -> Response:
    """Revokes a key."""
    api = api_of(request)
    await api.facts(revoke_key, api.client, api.settings, name, by=visitor.asker.name)
    return answer_change(request, visitor, "", to="/send?done=revoked#keys")


async def _heard(api: Api, visitor: Visitor) -> dict[str, list[HeardSender]]:
    """The senders of each protocol, the one that was heard last first; none for a key that sees some
    workloads alone."""
    if visitor.asker.only:
        return {}
    senders = await api.shared.ask(
        "senders", partial(api.facts, read_senders, api.client, api.settings), fresh_s=0.5
    )
    found: dict[str, list[HeardSender]] = {}
    for one in senders:
        if one.lines:
            found.setdefault(one.protocol, []).append(one)
    return found


async def _of_admins(api: Api, visitor: Visitor, cursor: str | None) -> dict[str, Any]:
    if not visitor.may(ADMIN) or visitor.asker.only:
        return {"keys": None, "log": None}
    return {
        "keys": await api.facts(read_keys, api.client, api.settings),
        "log": await api.facts(read_audit, api.client, api.settings, limit=AUDIT, cursor=cursor),
    }
