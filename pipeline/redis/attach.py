"""Which stack a command talks to: REDIS_URL, or the one that runs on the data directory."""

import json
import os
from pathlib import Path

from pipeline.errors import BadInput
from pipeline.logs import logger
from pipeline.settings import Settings


def state_file(data_dir: Path) -> Path:
    """Where the embedded stack of a data directory says how it is reached."""
    return data_dir / "stack.json"


def running(data_dir: Path) -> dict[str, object] | None:
    """The state file of the stack that runs on this data directory, None when none runs."""
    try:
        state: dict[str, object] = json.loads(state_file(data_dir).read_text(encoding="utf-8"))
        os.kill(int(str(state["pid"])), 0)
    except (OSError, ValueError, KeyError):
        return None
    return state


def _hidden(data_dir: Path) -> bool:
    """Whether a stack says something there that is not for this user."""
    try:
        state_file(data_dir).read_bytes()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def attached(settings: Settings) -> Settings:
    """Settings for the stack of the data directory, or for REDIS_URL. Raises BadInput when there is none.

    Settings that all processes must share (settings.ALIKE) come from the stack: a quota that one planner
    ignores is no quota. With REDIS_URL every machine has to set them alike."""
    if settings.redis.url is not None:
        return settings
    state = running(settings.data.dir)
    if state is None and _hidden(settings.data.dir):
        raise BadInput(
            f"{state_file(settings.data.dir)} cannot be read: the stack there is another user's; work as "
            "that user, or set REDIS_URL"
        )
    if state is None:
        raise BadInput(
            f"no logweir stack runs on {settings.data.dir}; start it with `logweir up`, or set REDIS_URL or "
            "--data-dir"
        )
    return _under(state.get("policy"), settings).replace(
        data_dir=settings.data.dir.absolute(),
        redis_url=str(state["redis_url"]),
        key_prefix=str(state["key_prefix"]),
    )


def _under(policy: object, settings: Settings) -> Settings:
    """The stack's policy; as it was where an older stack did not write any."""
    if not isinstance(policy, dict):
        return settings
    found = settings.under(policy)
    plain, theirs = Settings().policy(), found.policy()
    for name, value in settings.policy().items():
        if value not in (plain[name], theirs[name]):
            logger(setting=name).warning(
                "setting.of_the_stack",
                why=f"{name} of the running stack counts; to change it, restart `logweir up` with it",
            )
    return found
