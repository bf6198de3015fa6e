"""A Docker Compose file as the arguments of `podman run`: the file itself is tested, never a copy of it.

Only what our files use is read. An unknown key fails, so that nothing of a service is left out in silence.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

# `build`, `healthcheck`, `depends_on` and `profiles` are for whoever starts the services.
_ELSEWHERE: Final = {"build", "image", "healthcheck", "depends_on", "profiles", "command", "volumes", "ports"}
_INNERMOST: Final = re.compile(r"\$\{(\w+)(?::([-+?])([^${}]*))?\}")
_REFUSED: Final = "\0"


def interpolated(text: str, values: Mapping[str, str]) -> str:
    """`${NAME}`, `${NAME:-default}`, `${NAME:+instead}` and `${NAME:?reason}`, also one within another.

    Raises ValueError with the reason, if what is missing is still there when all is put in."""

    def put(found: re.Match[str]) -> str:
        name, operator, word = found.groups()
        value = values.get(name, "")
        if operator == "?" and not value:
            return f"{_REFUSED}{name}: {word}"
        if operator == "-":
            return value or word
        return word if operator == "+" and value else "" if operator == "+" else value

    while (after := _INNERMOST.sub(put, text)) != text:
        text = after
    if _REFUSED in text:
        raise ValueError(text.partition(_REFUSED)[2])
    return text


def _everywhere(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return interpolated(value, values)
    if isinstance(value, list):
        return [_everywhere(item, values) for item in value]
    if isinstance(value, dict):
        return {key: _everywhere(item, values) for key, item in value.items()}
    return value


def variables(text: str) -> dict[str, str]:
    """The variables of an env file in which no value is quoted."""
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def dot_envs(page: Path) -> list[dict[str, str]]:
    """The `.env` of each host, in the order of the document."""
    found = re.findall(
        r"^cat > \.env <<END\n(.*?)^END$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return [variables(text) for text in found]


@dataclass(frozen=True, slots=True)
class Service:
    """One service of a file, with every variable in its place."""

    name: str
    keys: Mapping[str, Any]
    environment: Mapping[str, str]

    @property
    def image(self) -> str:
        return str(self.keys["image"])

    @property
    def probe(self) -> list[str] | None:
        """The command of the health check."""
        test = self.keys.get("healthcheck", {}).get("test")
        return None if test is None else [str(word) for word in test[1:]]

    @property
    def command(self) -> list[str]:
        command = self.keys.get("command", [])
        return shlex.split(command) if isinstance(command, str) else list(command)

    def ports(self) -> Iterable[tuple[str, str, str]]:
        """(address, port of the host, port of the container)."""
        for port in self.keys.get("ports", ()):
            address, outside, inside = port.split(":")
            yield address, outside, inside

    def options(self, project: str) -> list[str]:
        """All of the service but ports, image and command. Raises ValueError for an unknown key."""
        said = [f"--env={name}={value}" for name, value in self.environment.items()]
        for volume in self.keys.get("volumes", ()):
            source, _, target = volume.partition(":")
            said.append(f"--volume={source if source.startswith('/') else f'{project}_{source}'}:{target}")
        for key, value in self.keys.items():
            match key:
                case "restart":
                    said.append(f"--restart={value}")
                case "stop_grace_period":
                    said.append(f"--stop-timeout={value.removesuffix('s')}")
                case "read_only":
                    # The engine's own extra would mount more than Docker does.
                    said += ["--read-only", "--read-only-tmpfs=false"] if value else []
                case "tmpfs":
                    said += [f"--tmpfs={place}" for place in value]
                case "cap_drop" | "security_opt":
                    # Docker writes `no-new-privileges:true` where Podman takes the bare word.
                    option = key.replace("_", "-")
                    said += [f"--{option}={word.removesuffix(':true')}" for word in value]
                case "env_file" | "environment":
                    pass  # they are in `environment`
                case _ if key not in _ELSEWHERE:
                    raise ValueError(f"{self.name}: what is {key!r} for podman?")
        return said


def services(
    files: Iterable[Path], dot_env: Mapping[str, str], *, profiles: Collection[str] = ()
) -> dict[str, Service]:
    """The services that these profiles start. Later files add keys, as our second file does.

    `dot_env`: the content of `.env`. It is an env file of services, and fills the variables of the files."""
    merged: dict[str, dict[str, Any]] = {}
    folder = None
    for file in files:
        folder = folder or file.parent
        for name, keys in yaml.safe_load(file.read_text(encoding="utf-8"))["services"].items():
            merged[name] = {**merged.get(name, {}), **keys}
    assert folder is not None
    found = {}
    for name, raw in merged.items():
        keys = _everywhere(raw, dot_env)  # also where no profile starts it: Compose fills in first
        environment: dict[str, str] = {}
        for file in keys.get("env_file", ()):
            path = file if isinstance(file, str) else file["path"]
            environment |= (
                dot_env if path == ".env" else variables((folder / path).read_text(encoding="utf-8"))
            )
        environment |= keys.get("environment", {})
        if not keys.get("profiles") or set(keys["profiles"]) & set(profiles):
            found[name] = Service(name, keys, environment)
    return found
