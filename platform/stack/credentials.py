"""The embedded stack's own secrets: made once, kept in `var/` for the owner's eyes only."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ADMIN = "admin"
_ROLE_RULES = "~* &* +@all -@admin -@dangerous +info +config|get +sort_ro"


def user_of(role: str) -> str:
    """The Redis user of a role: no tenant can have this name, for tenants' names have no dot."""
    return f"role.{role}"


def _administers(user: str) -> bool:
    """Whether it manages the broker's users: the operator, and every control worker."""
    return user in (user_of(ADMIN), user_of("control")) or user.startswith(user_of("control-"))


@dataclass(frozen=True, kw_only=True)
class Credentials:
    redis: dict[str, str]  # user (`user_of` a role) to password, for both servers
    s3_access_key: str
    s3_secret_key: str
    flower_user: str
    flower_password: str
    supervisor_password: str


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step; readable and writable by its owner alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)


def signing_key_file(var: Path) -> Path:
    """The platform's key for manifests; created when absent. Losing it voids every signature."""
    path = var / "signing.key"
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    return path


def load_or_create(var: Path, roles: Iterable[str]) -> Credentials:
    """Those of an earlier start, with users for new roles added."""
    path = var / "credentials.json"
    if path.exists():
        found = Credentials(**json.loads(path.read_text()))
    else:
        found = Credentials(
            redis={},
            s3_access_key=f"vla-{secrets.token_hex(6)}",
            s3_secret_key=secrets.token_urlsafe(32),
            flower_user=ADMIN,
            flower_password=secrets.token_urlsafe(18),
            supervisor_password=secrets.token_urlsafe(24),
        )
    for role in (ADMIN, *roles):
        found.redis.setdefault(user_of(role), secrets.token_urlsafe(24))
    write_private(path, json.dumps(asdict(found), indent=2))
    return found


def write_acl(path: Path, users: dict[str, str]) -> None:
    """The users of an embedded Redis. Users that others added and saved (tenants) stay.

    Nobody gets in without a password; passwords are kept as SHA-256.
    """
    lines = ["user default off"]
    for user, password in users.items():
        digest = hashlib.sha256(password.encode()).hexdigest()
        rules = "~* &* +@all" if _administers(user) else _ROLE_RULES
        lines.append(f"user {user} on #{digest} {rules}")
    if path.exists():
        ours = {"default", *users}
        old_lines = path.read_text().splitlines()
        lines += [old for old in old_lines if [*old.split(), "", ""][1] not in {"", *ours}]
    write_private(path, "\n".join(lines) + "\n")
