"""The proxies that say who looks at the console, and the scopes of the groups that they name."""

import ipaddress
from dataclasses import dataclass
from typing import Final

ROLES_DEFAULT: Final = "*=read"
SCOPES: Final = ("read", "mark", "operate", "admin")  # each brings those before it
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedProxies:
    """`networks`: where they connect from; none: no proxy is trusted. `roles`: the scope of each group; `*`
    stands for everybody."""

    networks: tuple[Network, ...] = ()
    roles: tuple[tuple[str, str], ...] = ()

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


def parse_proxies(networks: str, roles: str) -> TrustedProxies:
    """Of the settings `api_proxies` and `api_roles`. Raises ValueError in one sentence."""
    found: list[Network] = []
    for text in filter(None, (part.strip() for part in networks.split(","))):
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError:
            raise ValueError(
                f"api_proxies {text[:60]!r} is no network; write addresses such as 10.0.0.5 or 10.1.0.0/16"
            ) from None
    pairs: list[tuple[str, str]] = []
    for text in filter(None, (part.strip() for part in roles.split(","))):
        group, equals, scope = (part.strip() for part in text.rpartition("="))
        if not equals or not group or scope not in SCOPES:
            raise ValueError(
                f"api_roles {text[:60]!r} is no role; write GROUP=SCOPE with a scope of {', '.join(SCOPES)}, such as "
                "sre=operate"
            )
        pairs.append((group, scope))
    return TrustedProxies(networks=tuple(found), roles=tuple(pairs))
