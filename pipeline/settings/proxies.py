"""The proxies that say who looks at the console, and the scopes of the groups that they name."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

SCOPES: Final = ("read", "mark", "operate", "admin")  # each brings those before it
_HEADER: Final = re.compile(r"(user|groups): *([A-Za-z0-9-]{1,100})")
_SUCH_AS: Final = "`user: Remote-User, groups: Remote-Groups`"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedProxies:
    """`networks`: where they connect from; none: no proxy is trusted. `roles`: the scope of each group; `*`
    stands for everybody.

    Only `user` and `groups` count, the headers that these proxies set: a proxy passes on what a person sends
    in headers that it does not know."""

    networks: tuple[Network, ...] = ()
    roles: tuple[tuple[str, str], ...] = ()
    user: str = ""
    groups: str = ""  # "" where everybody has the same role

    def trusts(self, address: str) -> bool:
        """Whether a connection from there is one of theirs."""
        if not self.networks:
            return False
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return any((mapped or found) in network for network in self.networks)

    def scope_of(self, groups: list[str]) -> str | None:
        """The widest scope that these groups have, None where they have none."""
        scopes = {scope for group, scope in self.roles if group == "*" or group in groups}
        return max(scopes, key=SCOPES.index, default=None)


def parse_proxies(text: str) -> TrustedProxies:
    """Of the setting `api_proxies`: networks, `user:` and `groups:` with their headers, roles as GROUP=SCOPE.

    Without a role everybody reads. Raises ValueError in one sentence."""
    networks: list[Network] = []
    roles: list[tuple[str, str]] = []
    headers: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        group, equals, scope = (piece.strip() for piece in part.rpartition("="))
        if equals and group and scope in SCOPES:
            roles.append((group, scope))
            continue
        if header := _HEADER.fullmatch(part):
            headers[header[1]] = header[2]
            continue
        try:
            networks.append(ipaddress.ip_network(part))
        except ValueError:
            raise ValueError(
                f"api_proxies {part[:60]!r} is no network such as 10.1.0.0/16, no header such as {_SUCH_AS} and no "
                f"role: write GROUP=SCOPE with a scope of {', '.join(SCOPES)}"
            ) from None
    if roles and not networks:
        raise ValueError(f"api_proxies {text[:60]!r} names roles and no network; add one such as 10.1.0.0/16")
    if networks and "user" not in headers:
        raise ValueError(
            f"api_proxies {text[:60]!r} names no header of the user; add those that your proxy sets, {_SUCH_AS}"
        )
    return TrustedProxies(networks=tuple(networks), roles=tuple(roles) or (("*", SCOPES[0]),), **headers)
