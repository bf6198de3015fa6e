"""`logweir gpu agents`: the Redis users of node agents on other machines."""

import argparse
from typing import TYPE_CHECKING, Any

from pipeline.commands.common import out, print_json, printable
from pipeline.errors import BadInput

if TYPE_CHECKING:
    from pipeline.settings import Settings

FORGOTTEN = "this Redis has no aclfile, so it forgets the change when it restarts; name one in redis.conf and repeat this"


def change_agents(args: argparse.Namespace, pool: Any, settings: "Settings") -> int:
    """`gpu agents [token NAME | remove NAME]`."""
    from pipeline.service.access.agent_users import add_agent, agent_names, remove_agent
    from pipeline.service.access.audit import user_of_machine

    name = args.agent_name
    if args.change is None:
        names = agent_names(pool.client, settings)
        if args.json:
            print_json(names)
        else:
            text = (
                "\n".join(names)
                or "no agent has a user of its own; `logweir gpu agents token NAME` makes one"
            )
            out().print(printable(text) if not names else text, markup=False, soft_wrap=True)
        return 0
    if name is None:
        raise BadInput(f"name the agent: logweir gpu agents {args.change} NAME")
    if args.change == "remove":
        saved = remove_agent(pool.client, settings, name, by=user_of_machine())
        facts: dict[str, Any] = {"removed": name, "saved": saved}
        words = f"{printable(name)} is refused from now on"
    else:
        url, saved = add_agent(pool.client, settings, name, by=user_of_machine())
        facts = {"agent": name, "redis_url": url, "saved": saved}
        words = f"REDIS_URL={url} python -m pipeline.workers.agent {name}\nthis is the only time it is shown"
    if args.json:
        print_json(facts)
    else:
        out().print(words if saved else f"{words}\n{FORGOTTEN}", markup=False, soft_wrap=True)
    return 0
